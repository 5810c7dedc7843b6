"""The dtype of an operator: autocast for activations, at least float32 for chains of cores, TF32 for products."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "autocast_dtype",
    "autocast_input",
    "chain_dtype",
    "exact_float32_products",
    "uses_tf32",
    "without_autocast",
]


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


_INHERITS = "none"
_EXACT = (_INHERITS, "ieee")  # inherited all the way, that is float32 as well

# Of the device's products, last, and of what they inherit from while they say "none". cudnn's is CUDA's as a whole.
_BACKENDS: Any = torch.backends
_SETTINGS: tuple[tuple[Any, ...], ...] = (
    (_BACKENDS, _BACKENDS.cudnn, _BACKENDS.cuda.matmul),
    (_BACKENDS, _BACKENDS.mkldnn.matmul),
)


def uses_tf32() -> bool:
    """Whether products of float32 matrices on a GPU are made of TF32, by whichever of torch's settings."""
    # torch.get_float32_matmul_precision() raises where fp32_precision was set; this follows the old settings too
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@contextmanager
def exact_float32_products() -> Iterator[None]:
    """Have products of float32 matrices made of float32 within, on GPUs and CPUs; settings are then as they were."""
    changed = [(chain[-1], _own_value(chain)) for chain in _SETTINGS if chain[-1].fp32_precision not in _EXACT]
    for setting, _ in changed:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, value in changed:
            setting.fp32_precision = value


def _own_value(chain: tuple[Any, ...]) -> str:
    """The own value of the last setting; torch reports only the effective one, so a change of the parent tells."""
    *parents, setting = chain
    value: str = setting.fp32_precision
    if not parents or value == _INHERITS:
        return value
    parent, kept = parents[-1], _own_value(tuple(parents))
    parent.fp32_precision = "tf32" if value == "ieee" else "ieee"
    try:
        return value if setting.fp32_precision == value else _INHERITS
    finally:
        parent.fp32_precision = kept
