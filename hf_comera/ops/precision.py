"""Which dtype an operator works in: autocast applies to activations and is kept away from the tiny chains of cores."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "autocast_input", "chain_dtype", "without_autocast"]


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast wants ``x`` to have in matrix products on its device; that of ``x`` outside autocast."""
    device_type = x.device.type
    if not torch.amp.is_autocast_available(device_type):  # asking the meta device whether it is on raises
        return x.dtype
    if torch.is_autocast_enabled(device_type) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def autocast_input(x: Tensor) -> Tensor:
    """``x`` in that dtype."""
    return x.to(autocast_dtype(x))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products run in the dtype of their operands.

    Autocast would round every core product to 16 bits; the operators round the finished halves once instead.
    """
    device_type = x.device.type
    return (
        torch.autocast(device_type, enabled=False) if torch.amp.is_autocast_available(device_type) else nullcontext()
    )


def chain_dtype(core: Tensor) -> torch.dtype:
    """The dtype in which cores are contracted: at least float32, since the chain is tiny and its errors add up."""
    return torch.promote_types(core.dtype, torch.float32)
