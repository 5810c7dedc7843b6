"""Nonlinearities that may stand between the two halves of a TT linear.

All map zero to zero, so rank columns that are padding stay zero.

Source: CoLA, arXiv:2502.10940 (a nonlinearity between the two factors of a low-rank layer).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

__all__ = ["RANK_ACTIVATIONS", "check_rank_activation", "shrinkage"]

RANK_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "silu": silu}  # gelu is the exact one, by erf


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
    return (RANK_ACTIVATIONS[name](z).norm() / z.norm()).item()
