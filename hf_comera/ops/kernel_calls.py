"""What every call of a kernel needs: its device as the current one, the current stream, addresses of tensors."""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = ["current_stream", "on_device", "pointers"]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches go to a GPU; nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def current_stream(device: torch.device) -> int | None:
    """The stream that torch uses now, so that launches keep their order and can be captured in a CUDA graph."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Addresses for C; a missing tensor is null."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
