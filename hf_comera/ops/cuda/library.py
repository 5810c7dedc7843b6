"""The CUDA kernels as a loaded library, or the reason why there is none; nothing happens at import.

The first use on a machine compiles them, which takes about a minute; ``build_kernels`` does it beforehand.
"""

import contextlib
import ctypes
import functools
import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_comera.ops.cuda.build import KernelBuildError, build_emulated_library, build_library, is_built, load_library
from hf_comera.ops.cuda.switch import kernels_are_wanted

__all__ = [
    "KernelResources",
    "build_kernels",
    "check_status",
    "current_stream",
    "device_refusal",
    "emulated_kernels",
    "kernel_library",
    "kernels_refusal",
    "launch_refusal",
    "load_kernels",
    "local_architectures",
    "on_device",
    "pointers",
]

LOGGER = logging.getLogger(__name__)
# Arguments of the C functions: p pointer, i int, l 64-bit int, d double; the result first.
SIGNATURES = {
    "hf_comera_cuda_versions": "i pp",
    "hf_comera_trial_launch": "i p",
    "hf_comera_error_message": "s i",
    "hf_comera_coat_adamw_tensors": "i",
    "hf_comera_coat_adamw": "i piii p ddddd p",
    "hf_comera_tiled_mlp": "i i pppppp ppp liiiii d p",
    "hf_comera_tiled_mlp_chunks": "l li",
    "hf_comera_tiled_mlp_backward": "i i pppppp ppp pppp liiiii d p",
    "hf_comera_tt_halves_splits": "i",
    "hf_comera_tt_halves": "i piiiip",
    "hf_comera_tt_halves_backward": "i piiiip",
    "hf_comera_ttm_entries": "i",
    "hf_comera_ttm_rows": "i pppp lliiiiiip",
    "hf_comera_ttm_grad_rows": "i pppp lliip",
    "hf_comera_ttm_table_gradient": "i i ppppppp llliiiip",
    "hf_comera_low_rank_linear": "i ipppppp liiip",
    "hf_comera_low_rank_linear_chunks": "l ilii",
    "hf_comera_low_rank_linear_backward": "i ipppppppppppp liiip",
}
TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "d": ctypes.c_double,
    "s": ctypes.c_char_p,
}
STATUS = {
    -1: "this rank is not supported",
    -2: "this precision is not supported",
    -3: "this activation is not supported",
    -4: "a size is negative or too large",
}
PRECISIONS = ["bf16", "tf32", "fp32"]  # the numbers of kernels/fragments.h
ELEMENTS = {"f": "fp32", "t": "bf16"}  # float and uint16_t in the names of templates
VARIANTS = {("b", 1): "aligned", ("b", 0): "any sizes", ("i", 1): "plain", ("i", 2): "gated"}  # by a template argument
MINIMUM_CAPABILITY = (8, 0)


class KernelResources(NamedTuple):
    """The resources of a multiprocessor that one compiled kernel takes."""

    kernel: str
    architecture: str
    num_registers: int
    spilled_bytes: int
    shared_bytes: int


def build_kernels(architectures: Sequence[str] | None = None) -> list[KernelResources]:
    """Compile the kernels, or find them in the cache, and say what each one takes.

    Args:
        architectures: Names such as ``"sm_90a"``; default are the GPUs of this machine.

    Raises:
        ValueError: If a name is not supported.
        KernelBuildError: If there is no GPU and no name, no nvcc, or the compiler fails.
    """
    names = list(architectures or []) or local_architectures()
    if not names:
        raise KernelBuildError(
            f"{device_refusal()}. Name the architecture to build for another machine, for example 'sm_90a'."
        )
    logs = [build_library(name).log.read_text(encoding="utf-8") for name in names]
    return [row for log in logs for row in read_resources(log)]


def local_architectures() -> list[str]:
    """Architectures of the GPUs that torch sees and the kernels support."""
    if not torch.cuda.is_available():
        return []
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return sorted({_architecture(device) for device in devices if device_refusal(device) is None})


def device_refusal(device: torch.device | None = None) -> str | None:
    """Why a GPU (default: the current one) cannot run the kernels, or None where it can. Compiles nothing."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    index = _index(device or torch.device("cuda"))
    capability = torch.cuda.get_device_capability(index)
    if capability >= MINIMUM_CAPABILITY:
        return None
    name = torch.cuda.get_device_name(index)
    return f"the GPU ({name}) has compute capability {capability[0]}.{capability[1]}, the kernels need 8.0 or newer"


def kernel_library(device: torch.device) -> ctypes.CDLL:
    """The compiled kernels for a GPU; for the CPU the emulated ones, which are for tests.

    Raises:
        KernelBuildError: As :func:`load_kernels` and :func:`emulated_kernels`.
    """
    return load_kernels(device) if device.type == "cuda" else emulated_kernels()


def load_kernels(device: torch.device) -> ctypes.CDLL:
    """The library for a GPU, compiled and tried on first use; ``cuda`` without a number is the current one.

    Raises:
        KernelBuildError: With the reason, if there is none or its kernels do not start.
    """
    if not torch.cuda.is_available():
        raise KernelBuildError(str(device_refusal(device)))
    return _library_of(_index(device))


@functools.cache
def _library_of(index: int) -> ctypes.CDLL:
    device = torch.device("cuda", index)
    if reason := device_refusal(device):
        raise KernelBuildError(reason)
    architecture = _architecture(device)
    if not is_built(architecture):
        LOGGER.warning("Compiling the CUDA kernels for %s with nvcc, once; this takes about a minute.", architecture)
    library = _load(build_library(architecture).library)
    if reason := launch_refusal(library, device):
        raise KernelBuildError(reason)
    return library


def launch_refusal(library: ctypes.CDLL, device: torch.device) -> str | None:
    """Why the kernels of a loaded library do not start on a device, or None where an empty one did."""
    driver, compiled = ctypes.c_int(), ctypes.c_int()
    status = library.hf_comera_cuda_versions(ctypes.byref(driver), ctypes.byref(compiled))
    if not status:
        with on_device(device):
            status = library.hf_comera_trial_launch(current_stream(device))
    if not status:
        return None
    supported, needed = (f"{number.value // 1000}.{number.value % 1000 // 10}" for number in (driver, compiled))
    reason = f"a trial launch on {device} failed: CUDA says {library.hf_comera_error_message(status).decode()!r}"
    versions = f"the driver runs CUDA {supported} and older, nvcc here is of CUDA {needed}"
    # within one major version, machine code of a newer toolkit runs on an older driver
    if driver.value // 1000 >= compiled.value // 1000:
        return f"{reason} ({versions})"
    return (
        f"{reason}; {versions}. Update the NVIDIA driver to one for CUDA {needed}, or put an nvcc of CUDA {supported} "
        "or older first on the PATH: a library of its own is compiled then"
    )


@functools.cache
def emulated_kernels() -> ctypes.CDLL:
    """The same kernels for CPU tensors, very slow; for tests.

    Raises:
        KernelBuildError: If g++ is missing or fails.
    """
    return _load(build_emulated_library().library)


def kernels_refusal(device: torch.device) -> str | None:
    """Why the kernels cannot be used on a GPU, or None where they can; compiles them if that has not been done.

    The answer is kept: a failing compiler is not started again in this process, and is reported once.
    """
    return _refusal_of(_index(device) if torch.cuda.is_available() else None)


@functools.cache
def _refusal_of(index: int | None) -> str | None:
    try:
        load_kernels(torch.device("cuda" if index is None else f"cuda:{index}"))
    except (KernelBuildError, OSError) as error:
        if kernels_are_wanted():
            LOGGER.warning("CUDA kernels were asked for, but plain torch runs in their place: %s", error)
        return str(error)
    return None


def check_status(library: ctypes.CDLL, status: int, function: str) -> None:
    """Turn an error code of the library into an exception.

    Raises:
        RuntimeError: If ``status`` is not 0.
    """
    if status > 0:
        raise RuntimeError(f"{function} failed: CUDA says {library.hf_comera_error_message(status).decode()!r}.")
    if status < 0:
        raise RuntimeError(f"{function} failed: {STATUS.get(status, f'status {status}')}.")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches go to a GPU; nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def current_stream(device: torch.device) -> int | None:
    """The stream that torch uses now, so that launches keep their order and can be captured in a CUDA graph."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Addresses for C; a missing tensor is null."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def read_resources(log: str) -> list[KernelResources]:
    """Rows of a build log of nvcc, in its order."""
    rows, name, architecture, spilled = [], "", "", 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            (name, architecture), spilled = found.groups(), 0
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(found[1]) + int(found[2])
        elif name and (found := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            registers, shared_bytes = int(found[1]), int(shared[1]) if shared else 0
            rows.append(KernelResources(_readable(name), architecture, registers, spilled, shared_bytes))
            name = ""
    return rows


def _readable(mangled: str) -> str:
    """``linear<bf16, 32, aligned>`` from the name in the object file."""
    found = re.search(r"\d+([a-z_]+)_kernel(?:I([ft]+|(?:L[ib]\d+E)+)E)?", mangled)
    if found is None:
        return mangled
    if found[2] and found[2][0] in ELEMENTS:
        return f"{found[1]}<{', '.join(ELEMENTS[letter] for letter in found[2])}>"
    values = [(kind, int(value)) for kind, value in re.findall(r"L([ib])(\d+)E", found[2] or "")]
    if len(values) == 3:
        (_, precision), (_, rank), last = values
        return f"{found[1]}<{PRECISIONS[precision]}, {rank}, {VARIANTS[last]}>"
    return found[1] + (f"<{', '.join(str(value) for _, value in values)}>" if values else "")


def _index(device: torch.device) -> int:
    """Its number; as everywhere in torch, the current device's where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def _architecture(device: torch.device) -> str:
    """``sm_80``, or ``sm_90a`` with what only that architecture has."""
    major, minor = torch.cuda.get_device_capability(_index(device))
    return f"sm_{major}{minor}" + "a" * (major == 9)


def _load(path: Path) -> ctypes.CDLL:
    library = load_library(path)
    for name, signature in SIGNATURES.items():
        result, *arguments = [TYPES[letter] for letter in signature.replace(" ", "")]
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
