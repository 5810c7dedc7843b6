"""Kernels for the device of a test: compiled by g++ for a CPU, by nvcc for a GPU, and kept for later sessions."""

import functools
import os
import tempfile
from pathlib import Path

import pytest

from hf_comera.ops import use_kernels
from hf_comera.ops.cuda.build import find_gcc
from hf_comera.ops.cuda.dispatch import serve_devices
from hf_comera.ops.cuda.library import SIGNATURES, emulated_kernels, kernel_library, kernels_refusal


@pytest.fixture(autouse=True, scope="session")
def _cache_of_the_tests():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_COMERA_CACHE", str(Path(tempfile.gettempdir()) / f"hf_comera-tests-{os.getuid()}"))
        yield


@pytest.fixture
def kernels(device, _cache_of_the_tests):
    """The device, with its kernels ready; a CPU without g++ skips the test, or fails it where all must run."""
    if device.type == "cuda":
        assert kernels_refusal(device) is None
    elif find_gcc() is None:
        give_up = pytest.fail if os.environ.get("HF_COMERA_REQUIRE_EMULATION") == "1" else pytest.skip
        give_up("g++ is not installed, so the kernels cannot be emulated on the CPU")
    else:
        emulated_kernels()
    return device


@pytest.fixture
def served(kernels):
    """The device, whose operators have kernels: on a CPU the emulated ones; ``use_kernels(False)`` is plain torch."""
    serve_devices(kernels.type)
    use_kernels()
    yield kernels
    use_kernels(False)
    serve_devices("cuda")


@pytest.fixture
def calls(kernels, monkeypatch):
    """Name and arguments of every launch, through whatever operator."""
    seen, library = [], kernel_library(kernels)

    def watched(name, launch, *arguments):
        seen.append((name.removeprefix("hf_comera_"), arguments))
        return launch(*arguments)

    for name, signature in SIGNATURES.items():
        if "p" in signature:  # the others launch nothing
            watch = functools.partial(watched, name, getattr(library, name))
            monkeypatch.setitem(vars(library), name, watch)
    return seen
