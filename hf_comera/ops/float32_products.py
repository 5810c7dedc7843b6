"""What products of float32 matrices are made of: whether torch may use TF32 for them, and how it is kept from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["exact_float32_products", "uses_tf32"]

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
    """What the last setting was set to; torch tells only what it comes to, so it is seen whether it follows."""
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
