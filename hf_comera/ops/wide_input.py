"""What a hidden layer is made of: linear maps of codes, and a nonlinearity in a form that kernels know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

__all__ = ["WIDE_ACTIVATIONS", "WideForm", "WideInput"]

WIDE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}
# from a gradient and the input; autograd is not at hand inside of an operator
_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
}


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


@dataclass(frozen=True)
class WideForm:
    """The nonlinearity ``act(input) [* gate] [* mask * scale]``, entry by entry."""

    activation: str
    """``"gelu"`` (exact), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``."""
    order: tuple[int, ...]
    """Which input goes through the activation, and where there are two, which one is the gate."""
    scale: float | None = None
    """``1 / (1 - p)`` of dropout, whose mask is the only one; None without dropout."""

    def __call__(self, wides: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
        """Rows of the hidden layer, from rows of inputs and masks."""
        activated, *gates = (wides[place] for place in self.order)
        hidden = WIDE_ACTIVATIONS[self.activation](activated)
        for gate in gates:
            hidden = hidden * gate
        return hidden if self.scale is None else hidden * masks[0] * self.scale

    def gradients(self, dhidden: Tensor, wides: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the rows of inputs that are in order."""
        dhidden = dhidden.to(wides[0].dtype)
        if self.scale is not None:
            dhidden = dhidden * masks[0] * self.scale
        derivative, (activated, *gates) = _DERIVATIVES[self.activation], wides
        if not gates:
            return [derivative(dhidden, activated)]
        return [derivative(dhidden * gates[0], activated), dhidden * WIDE_ACTIVATIONS[self.activation](activated)]

    def in_order(self, inputs: Sequence[WideInput]) -> tuple[list[WideInput], "WideForm"]:
        """The inputs in the order that operators take them in, and the form that then holds."""
        return [inputs[place] for place in self.order], replace(self, order=tuple(range(len(inputs))))

    def settings(self) -> dict[str, Any]:
        """What operators take besides tensors."""
        return {"activation": self.activation, "scale": self.scale}
