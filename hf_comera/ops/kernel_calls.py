"""What every call of a kernel needs: the library of a device, its current stream, addresses of tensors."""

import contextlib
import ctypes
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from hf_comera.ops.kernels import emulated_kernels, load_kernels

__all__ = ["current_stream", "kernel_library", "on_device", "pointers"]


def kernel_library(device: torch.device) -> ctypes.CDLL:
    """The compiled kernels for a GPU; for the CPU the emulated ones, which are for tests."""
    return load_kernels(device) if device.type == "cuda" else emulated_kernels()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches go to a GPU; nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def current_stream(device: torch.device) -> int | None:
    """The stream that torch uses now, so that launches keep their order and can be captured in a CUDA graph."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Addresses for C; a missing tensor is null."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
