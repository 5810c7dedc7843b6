"""Nonlinearities that may stand between the two halves of a TT linear, with their derivatives.

All map zero to zero, so rank columns that are padding stay zero.

Source: CoLA, arXiv:2502.10940 (a nonlinearity between the two factors of a low-rank layer).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RANK_ACTIVATIONS", "RankActivation", "check_rank_activation", "shrinkage"]


class RankActivation(NamedTuple):
    """A nonlinearity and its backward.

    Shape:
        ``function``: code ``(...) -> (...)``; ``backward``: gradient of the result and code, both ``(...)``, to the
        gradient of the code.
    """

    function: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _silu_backward(grad: Tensor, code: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # somebody wants second derivatives, which torch's fused backward does not have
        sigmoid = torch.sigmoid(code)
        return grad * sigmoid * (1 + code * (1 - sigmoid))
    return torch.ops.aten.silu_backward(grad, code)


RANK_ACTIVATIONS = {
    "gelu": RankActivation(torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default),  # the exact one, by erf
    "silu": RankActivation(torch.ops.aten.silu.default, _silu_backward),
}


def check_rank_activation(name: str | None) -> None:
    """Refuse names that are not in the table; None is no nonlinearity.

    Raises:
        ValueError: If ``name`` is unknown.
    """
    if name is not None and name not in list(RANK_ACTIVATIONS):  # a list, since a bad value may be unhashable
        raise ValueError(
            f"rank_activation={name!r} is unknown. Use one of {', '.join(map(repr, sorted(RANK_ACTIVATIONS)))}, for "
            "example rank_activation='silu', or None for no nonlinearity."
        )


def shrinkage(name: str, deviation: float) -> float:
    """Root mean square of ``act(z)`` over that of ``z``, for normal ``z`` of a deviation (at least a millionth).

    >>> round(shrinkage("silu", 1.0), 2)
    0.6
    """
    points = torch.linspace(0, 1, 2002, dtype=torch.float64)[1:-1]  # equally likely values; 4 digits are plenty
    z = max(deviation, 1e-6) * math.sqrt(2) * torch.erfinv(2 * points - 1)
    return (RANK_ACTIVATIONS[name].function(z).norm() / z.norm()).item()
