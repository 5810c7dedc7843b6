"""kernels/library.cu: an empty kernel starts where others do, and its error is the reason where they do not."""

import ctypes

import pytest
import torch

from hf_comera.ops.cuda import build
from hf_comera.ops.cuda.build import find_nvcc, sources_folder
from hf_comera.ops.cuda.library import kernel_library, launch_refusal


def test_an_empty_kernel_starts(kernels):
    assert launch_refusal(kernel_library(kernels), kernels) is None


@pytest.mark.skipif(find_nvcc() is None or torch.cuda.is_available(), reason="wants nvcc and no GPU")
def test_without_a_driver(tmp_path, monkeypatch):
    for name in ("library.cu", "portable.h"):
        (tmp_path / name).symlink_to(sources_folder() / name)
    monkeypatch.setenv("HF_COMERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "sources_folder", lambda: tmp_path)
    library = ctypes.CDLL(str(build.build_library("sm_80").library))
    library.hf_comera_error_message.restype = ctypes.c_char_p
    found = launch_refusal(library, torch.device("cpu"))
    assert "CUDA driver version is insufficient" in found
    assert "Update the NVIDIA driver" in found
