"""What a hidden layer is made of: linear maps of codes, and a nonlinearity in a form that kernels know."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["WideForm", "WideInput"]


class WideInput(NamedTuple):
    """One linear map into the hidden layer: ``code @ right + bias``."""

    code: Tensor
    """``(T, rank)``."""
    right: Tensor
    """``(rank, H)``, in the dtype of ``code``."""
    bias: Tensor | None

    def rows(self, chunk: slice) -> Tensor:
        """A few rows of the map."""
        wide = self.code[chunk] @ self.right
        if self.bias is None:
            return wide
        return wide + self.bias if torch.is_grad_enabled() else wide.add_(self.bias)  # in place: half the writes


class WideForm(NamedTuple):
    """The nonlinearity ``act(input) [* gate] [* mask * scale]``."""

    activation: str
    """``"gelu"`` (exact), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``."""
    order: tuple[int, ...]
    """Which input goes through the activation, and where there are two, which one is the gate."""
    scale: float | None = None
    """``1 / (1 - p)`` of dropout, whose mask is the only one; None without dropout."""
