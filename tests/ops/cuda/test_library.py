"""hf_comera/ops/cuda/library.py: names why there are no module, and what compiled ones take."""

import contextlib
import ctypes

import pytest
import torch

from hf_comera.ops.cuda import library as module
from hf_comera.ops.cuda import switch
from hf_comera.ops.cuda.build import KernelBuild, KernelBuildError, find_nvcc
from hf_comera.ops.cuda.library import (
    KernelResources,
    build_kernels,
    check_status,
    device_refusal,
    kernels_refusal,
    launch_refusal,
    load_kernels,
)

GPU = torch.device("cuda", 0)
LOG = """
ptxas info    : Compiling entry function '_ZN59_GLOBAL__N__ab_18_low_rank_linear_cu_8ee2064b13linear_kernelILi0ELi32ELb1EEEvNS_6LinearE' for 'sm_90a'
ptxas info    : Function properties for _ZN59_GLOBAL__N
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 40960 bytes smem
ptxas info    : Compile time = 120.3 ms
ptxas info    : Compiling entry function '_ZN12_GLOBAL__N_10sum_kernelENS_8BackwardE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
ptxas info    : Compiling entry function '_ZN51_GLOBAL__N__ab_12_wide_code_cu_8ee2064b16tiled_mlp_kernelILi0ELi64ELi2EEEvNS_7ForwardE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 219 registers, used 1 barriers, 36864 bytes smem
ptxas info    : Compiling entry function '_ZN12_GLOBAL__N_12table_kernelILb1EEEvNS_9GradientsE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 56 registers, used 1 barriers, 32768 bytes smem
ptxas info    : Compiling entry function '_ZN12_GLOBAL__N_13halves_kernelItfEEvN6chains5TableE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 89 registers, used 1 barriers, 4360 bytes cmem[0]
"""  # noqa: E501


def forget():
    module._library_of.cache_clear()
    module._refusal_of.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_is_loaded_yet():
    forget()
    yield
    forget()


def pretend_gpu(monkeypatch, *capabilities):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Pretended GPU")


def test_reads_the_log_of_nvcc():
    assert module.read_resources(LOG) == [
        KernelResources("linear<bf16, 32, aligned>", "sm_90a", 128, 20, 40960),
        KernelResources("sum", "sm_80", 32, 0, 0),
        KernelResources("tiled_mlp<bf16, 64, gated>", "sm_80", 219, 0, 36864),
        KernelResources("table<1>", "sm_80", 56, 0, 32768),
        KernelResources("halves<bf16, fp32>", "sm_80", 89, 0, 0),
    ]


def test_says_that_there_is_no_gpu(monkeypatch):
    pretend_gpu(monkeypatch)
    assert "torch finds no CUDA device" in kernels_refusal(GPU)
    with pytest.raises(KernelBuildError, match="no CUDA device"):
        load_kernels(GPU)
    with pytest.raises(KernelBuildError, match=r"no CUDA device.*'sm_90a'"):
        build_kernels()


def test_says_that_the_gpu_is_too_old(monkeypatch):
    pretend_gpu(monkeypatch, (7, 5))
    assert "Pretended GPU" in kernels_refusal(GPU)
    assert "7.5" in kernels_refusal(GPU)
    assert "8.0" in kernels_refusal(GPU)


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    def fail(architecture):
        raise KernelBuildError(f"no nvcc for {architecture}")

    pretend_gpu(monkeypatch, (7, 5), (9, 0))
    monkeypatch.setattr(module, "is_built", lambda architecture: True)
    monkeypatch.setattr(module, "build_library", fail)
    unnumbered = torch.device("cuda")
    assert "7.5" in kernels_refusal(unnumbered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_refusal() is None
    assert device_refusal(unnumbered) is None
    assert kernels_refusal(unnumbered) == "no nvcc for sm_90a"
    with pytest.raises(KernelBuildError, match="sm_90a"):
        load_kernels(unnumbered)


def test_passes_on_why_a_build_fails(monkeypatch, caplog):
    def fail(architecture):
        raise KernelBuildError(f"no nvcc for {architecture}")

    pretend_gpu(monkeypatch, (9, 0), (8, 6))
    monkeypatch.setattr(module, "is_built", lambda architecture: False)
    monkeypatch.setattr(module, "build_library", fail)
    with caplog.at_level("WARNING"):
        assert kernels_refusal(GPU) == "no nvcc for sm_90a"
    assert "Compiling the CUDA kernels for sm_90a" in caplog.text  # a silent minute looks like a hang
    assert kernels_refusal(torch.device("cuda", 1)) == "no nvcc for sm_86"


def test_builds_for_every_gpu_that_is_new_enough(monkeypatch, tmp_path):
    asked = []
    (tmp_path / "log").write_text(LOG)

    def build_library(architecture):
        asked.append(architecture)
        return KernelBuild(tmp_path / "library", tmp_path / "log")

    pretend_gpu(monkeypatch, (9, 0), (7, 5), (8, 0), (9, 0))
    monkeypatch.setattr(module, "build_library", build_library)
    assert len(build_kernels()) == 2 * len(module.read_resources(LOG))
    assert asked == ["sm_80", "sm_90a"]


class PretendedLibrary:
    """A library whose CUDA is of one version, on a driver of another, and whose launches end with a status."""

    def __init__(self, driver, compiled, status):
        self.driver, self.compiled, self.status, self.streams = driver, compiled, status, []

    def hf_comera_cuda_versions(self, driver, compiled):
        driver._obj.value, compiled._obj.value = self.driver, self.compiled
        return 0

    def hf_comera_trial_launch(self, stream):
        self.streams.append(stream)
        return self.status

    def hf_comera_error_message(self, status):
        return f"error {status}".encode()


@pytest.mark.parametrize(
    ("driver", "compiled", "status", "words"),
    [
        (13000, 13000, 0, []),
        (13010, 12080, 0, []),
        (12020, 12080, 0, []),  # compatible within a major version: only the launch decides
        (12040, 13000, 35, ["'error 35'", "driver runs CUDA 12.4", "nvcc here is of CUDA 13.0", "Update", "PATH"]),
        (13000, 13000, 209, ["'error 209'", "CUDA 13.0"]),
    ],
)
def test_kernels_that_do_not_start_are_refused(driver, compiled, status, words):
    library = PretendedLibrary(driver, compiled, status)
    found = launch_refusal(library, torch.device("cpu"))
    assert library.streams == [None]
    assert (found is None) is (status == 0)
    for word in words:
        assert word in found
    assert status == 35 or "Update" not in (found or "")


def test_plain_torch_runs_where_kernels_do_not_start(monkeypatch, tmp_path, caplog):
    """With a driver that is too old everything before the first launch works."""
    library = PretendedLibrary(12040, 13000, 35)
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(switch, "_wanted", True)
    monkeypatch.setattr(module, "is_built", lambda architecture: True)
    monkeypatch.setattr(module, "build_library", lambda architecture: KernelBuild(tmp_path, tmp_path))
    monkeypatch.setattr(module, "_load", lambda path: library)
    monkeypatch.setattr(module, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(module, "current_stream", lambda device: 7)
    for _ in range(3):
        assert "driver runs CUDA 12.4" in kernels_refusal(GPU)
    assert library.streams == [7]
    assert caplog.text.count("plain torch runs in their place: a trial launch on cuda:0 failed") == 1
    with pytest.raises(KernelBuildError, match=r"CUDA 12\.4"):
        load_kernels(GPU)


def test_error_codes_become_exceptions():
    class Library:
        @staticmethod
        def hf_comera_error_message(status):
            return b"out of luck"

    check_status(Library, 0, "f")
    with pytest.raises(RuntimeError, match=r"f failed: CUDA says 'out of luck'"):
        check_status(Library, 2, "f")
    with pytest.raises(RuntimeError, match="rank is not supported"):
        check_status(Library, -1, "f")


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_kernels_of_aligned_sizes_do_not_spill(architecture, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_COMERA_CACHE", str(tmp_path))
    rows = build_kernels([architecture])
    assert {row.architecture for row in rows} == {architecture}
    names = {row.kernel.partition("<")[0] for row in rows}
    linear = {"linear", "code_gradient", "product", "sum"}
    chains = {"halves", "last_link", "other_links"}
    wide = {"tiled_mlp", "wide_code_gradient", "wide_feature_gradient", "wide_sum"}
    lookup = {"rows", "run_sums", "long_runs", "table", "table_sum"}
    assert names == linear | chains | wide | lookup | {"coat_adamw", "trial"}
    spilling = [row for row in rows if row.spilled_bytes and "any sizes" not in row.kernel]
    assert not spilling
    (library,) = tmp_path.rglob("*.so")
    loaded = ctypes.CDLL(str(library))
    assert all(hasattr(loaded, name) for name in module.SIGNATURES)
