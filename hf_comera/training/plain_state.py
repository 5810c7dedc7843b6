"""The state of an optimizer with moments in the shapes of the parameters, whichever way the optimizer keeps them."""

from typing import Any

import torch
from torch import Tensor

from hf_comera.optim import CoatAdamW

__all__ = ["plain_state", "set_plain_state"]


def plain_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The state of ``parameter``: a decoded copy where it is quantised, else the very one; empty if there is none.

    What is changed in it holds after :func:`set_plain_state`. Accelerate's wrapper is looked through.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if isinstance(optimizer, CoatAdamW):
        return optimizer.plain_state(parameter)
    return optimizer.state.get(parameter, {})


def set_plain_state(optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Any]) -> None:
    """Make ``state`` that of ``parameter``; no other state is touched."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if isinstance(optimizer, CoatAdamW) and state:
        optimizer.set_plain_state(parameter, state)
    elif state:
        optimizer.state[parameter] = state
