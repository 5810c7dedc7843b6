"""How much memory a training takes, by kind and at its peak, and what the C library does with freed memory.

On a CPU measure a peak in a process of its own, and run what is measured once before:
otherwise memory that was freed earlier is used again and not seen.
"""

import ctypes
import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_comera.modules.halves_cache import drop_cached_halves

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_NEVER = 2**31 - 1
_SMALLEST_OWN_BLOCK = 65536
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # of proc(5): the peak becomes what is resident now


def keep_freed_memory() -> bool:
    """Stop returning large freed blocks to the system.

    On a CPU every output of some megabytes is otherwise fresh memory, and touching fresh memory costs a page fault
    every 4096 bytes: more time than a thin matrix product takes. The process keeps its peak size in exchange.

    Returns:
        Whether the C library could be told: True with glibc on Linux, False elsewhere, where nothing changes.
    """
    return _set_options({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER})


def hand_back_freed_memory() -> bool:
    """Return every freed block of 64 KiB and more to the system at once, so that the resident size is what is in use.

    glibc otherwise raises the size from which blocks are returned to that of the largest one freed so far, up to
    32 MiB, and keeps smaller ones in an arena for each thread.

    Returns:
        As for :func:`keep_freed_memory`.
    """
    return _set_options({_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _SMALLEST_OWN_BLOCK, _M_TRIM_THRESHOLD: 0})


def trim_memory() -> None:
    """Return what lies free already; nothing without glibc."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _set_options(options: dict[int, int]) -> bool:
    mallopt = _function("mallopt")
    return mallopt is not None and all([bool(mallopt(name, value)) for name, value in options.items()])


def _function(name: str) -> Any:
    """A function of glibc; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None


class Growth(NamedTuple):
    """The most that was in use, less what was before."""

    num_bytes: int | None
    """None where the system does not say."""
    measured_by: str
    """``"VmHWM"``, ``"VmHWM of the process"``, ``"CUDA allocator"`` or nothing.

    The second stands for an upper bound, where the peak cannot be reset: it may be older than what was measured.
    """


def peak_growth(compute: Callable[[], object], device: torch.device) -> Growth:
    """Run ``compute`` once."""
    gc.collect()
    if device.type == "cuda":
        return _allocated(compute, device)
    if not STATUS.exists():
        compute()
        return Growth(None, "")
    return _resident(compute)


def largest_growth(compute: Callable[[], object], device: torch.device) -> Growth:
    """The larger of two runs; what the model keeps from step to step counts as made by each."""
    growths = []
    for _ in range(2):
        drop_cached_halves()
        growths.append(peak_growth(compute, device))
    return max(growths, key=lambda growth: growth.num_bytes or 0)


def _allocated(compute: Callable[[], object], device: torch.device) -> Growth:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    torch.cuda.synchronize(device)
    return Growth(torch.cuda.max_memory_allocated(device) - before, "CUDA allocator")


def _resident(compute: Callable[[], object]) -> Growth:
    trim_memory()
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        measured_by = "VmHWM"
    except OSError:
        measured_by = "VmHWM of the process"
    before = _status_bytes("VmRSS")
    compute()
    return Growth(max(0, _status_bytes("VmHWM") - before), measured_by)


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class TrainingBytes(NamedTuple):
    """Bytes at this moment."""

    weights: int
    gradients: int
    optimizer: int


def training_bytes(model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Bytes of weights, gradients and optimizer state, as they are at this moment."""
    return sum(bytes_by_kind(model, optimizers))


def bytes_by_kind(model: nn.Module, optimizers: Sequence[Optimizer]) -> TrainingBytes:
    """The three of :func:`training_bytes`; a tensor that two states share is counted once."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = {id(tensor): tensor for optimizer in optimizers for tensor in _tensors(optimizer.state.values())}
    return TrainingBytes(_num_bytes(parameters), _num_bytes(gradients), _num_bytes(states.values()))


def training_peak(step: Callable[[], object], model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> int | None:
    """The most memory that a training on a CPU takes: what is there between two steps, and what a step adds.

    Call it in a process of its own; the first step is not counted. None where the system does not say it of one step.
    """
    step()
    sizes = bytes_by_kind(model, optimizers)
    growth = largest_growth(step, torch.device("cpu"))
    if growth.num_bytes is None or growth.measured_by != "VmHWM":
        return None
    return sizes.weights + sizes.optimizer + growth.num_bytes


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the values of a state, and in objects that are part of it, such as the projections of GaLore."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif hasattr(value, "__dict__"):
            yield from _tensors(vars(value).values())


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
