"""Euclidean norms that are right for all finite entries, also where their squares are too large for the dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["finite_norms"]

_SMALLER = 2.0**-80  # with it the squares of 2**31 entries of float32, and of bfloat16, cannot overflow


def finite_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each tensor; one that is too large for the dtype is the largest number that is not.

    Args:
        tensors: Of one dtype, not float16, whose range is too small for this, and one device.

    Shape:
        T tensors of any shapes -> ``(T,)``.
    """
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    of_smaller = torch.stack(torch._foreach_norm(torch._foreach_mul(list(tensors), _SMALLER)))
    return torch.where(norms.isinf(), of_smaller / _SMALLER, norms).clamp_max(torch.finfo(norms.dtype).max)
