"""Dropout that keeps its mask in bits: drawn several entries at a time, saved as one bit an entry.

torch draws one number an entry, in one thread, and saves a mask as large as its input. On a CPU that is a large part
of the training step of a compressed model, and of its memory for backward.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["MIN_NUMEL", "decode_bits", "draw_kept", "drop", "kept_factors", "kept_share", "pack_bits", "serves"]

_GATHER = 0x0102040810204080
"""Bit ``56 - 7 j`` for each j: times it, bit ``8 j``, the truth of byte j, comes to ``56 + j``, the last byte."""

_WORDS = {1: torch.int64, 2: torch.complex128}
"""By bytes an entry: a dtype of eight entries, as single words are looked up twice as fast as rows."""


def decode_bits(bits: Tensor, value: Tensor) -> Tensor:
    """``value`` where a bit is set, 0 elsewhere.

    Shape:
        bits ``(..., n)``, uint8, the lowest bit of a byte first; value ``()`` -> ``(..., 8 * n)``.
    """
    # made for each call, in microseconds: one kept since a CUDA graph was captured would not outlive the graph
    places = torch.arange(8, device=bits.device)
    truths = torch.arange(256, device=bits.device)[:, None].bitwise_right_shift(places).bitwise_and_(1)
    table = torch.where(truths.bool(), value, torch.zeros_like(value))
    if value.itemsize in _WORDS:
        table = table.view(_WORDS[value.itemsize]).flatten()
    return table.index_select(0, bits.flatten().int()).view(value.dtype).view(*bits.shape[:-1], 8 * bits.shape[-1])


def pack_bits(truths: Tensor) -> Tensor:
    """Eight bools to a byte.

    Shape:
        ``(n,)`` -> ``(ceil(n / 8),)``
    """
    lacking = -len(truths) % 8
    if lacking or truths.storage_offset() % 8:  # not seen as words
        truths = torch.cat([truths, truths.new_zeros(lacking)])
    words = truths.view(torch.int64) * _GATHER
    return words.view(torch.uint8)[7::8].contiguous()


_LEVELS = 1 << 16
"""Values of a random number: the rate is rounded to multiples of 1 / 65536, and kept entries are scaled accordingly.

With 8 bits instead of 16 a rate of 0.1 would become 0.102.
"""

# Entries from which on it has been faster; below, more calls cost more than torch's draws.
MIN_NUMEL = 1 << 16

# Bytes of bits that are drawn at a time: their random numbers fit a core's cache.
_CHUNK_BYTES = 1 << 15


def serves(device: torch.device, num_entries: int, dropout: float) -> bool:
    """Whether that many entries can be dropped so, and faster: on a CPU, many, and not all or none of them."""
    return device.type == "cpu" and num_entries >= MIN_NUMEL and 0 < _dropped_levels(dropout) < _LEVELS


def kept_share(dropout: float) -> float:
    """The probability of being kept."""
    return 1 - _dropped_levels(dropout) / _LEVELS


def draw_kept(shape: Sequence[int], dropout: float, device: torch.device | str = "cpu") -> Tensor:
    """The bits of kept entries for a tensor of this shape, drawn by torch's generator of the device, on a CPU from its
    seed.

    Shape:
        ``(..., ceil(n / 8))`` for ``(..., n)``, uint8; the lowest bit of a byte comes first.
    """
    if torch.device(device).type == "cpu":
        # the bits follow from the seed: recomputation draws the seed alone, and has saved the bits
        return _draw_kept(torch.randint(2**63 - 1, (), device="cpu"), list(shape), float(dropout))
    *rows, last = shape
    width = -(-last // 8)
    places = torch.empty(prod(rows) * width * 8, dtype=torch.bool, device=device)
    return pack_bits(torch.bernoulli(places, kept_share(dropout))).view(*rows, width)


@torch.library.custom_op("hf_comera::draw_kept", mutates_args=())
def _draw_kept(seed: Tensor, shape: Sequence[int], dropout: float) -> Tensor:
    generator = torch.Generator().manual_seed(int(seed))
    *rows, last = shape
    width = -(-last // 8)
    bits = torch.empty(prod(rows) * width, dtype=torch.uint8, device="cpu")
    threshold = _dropped_levels(dropout) - _LEVELS // 2
    for start in range(0, len(bits), _CHUNK_BYTES):
        part = bits[start : start + _CHUNK_BYTES]
        words = torch.empty(2 * len(part), dtype=torch.int64, device="cpu")
        words.random_(-(2**63), None, generator=generator)
        part.copy_(pack_bits(words.view(torch.int16) >= threshold))
    return bits.view(*rows, width)


@_draw_kept.register_fake
def _(seed: Tensor, shape: Sequence[int], dropout: float) -> Tensor:
    return torch.empty(*shape[:-1], -(-shape[-1] // 8), dtype=torch.uint8, device="cpu")


def kept_factors(bits: Tensor, size: int, value: float, dtype: torch.dtype) -> Tensor:
    """``value`` for what is kept, 0 for the rest.

    Shape:
        bits ``(..., ceil(size / 8))`` -> ``(..., size)``.
    """
    # floats, not bools: a product with a mask of bools took over three times as long (benchmarks/NOTES.md)
    return decode_bits(bits, torch.tensor(value, dtype=dtype, device=bits.device))[..., :size]


def drop(x: Tensor, bits: Tensor, share: float) -> Tensor:
    """``x`` with zeros where it is not kept, and divided by ``share`` elsewhere.

    Shape:
        x of n entries, bits ``(ceil(n / 8),)`` -> as x, in its dtype.
    """
    return _drop(x, bits, share)


@torch.library.custom_op("hf_comera::drop", mutates_args=())
def _drop(x: Tensor, bits: Tensor, share: float) -> Tensor:
    value = 1 / share if x.itemsize > 2 else 1.0
    y = x * kept_factors(bits, x.numel(), value, x.dtype).view(x.shape)
    return y if x.itemsize > 2 else y.mul_(1 / share)  # a factor in 16 bits would be rounded


@_drop.register_fake
def _(x: Tensor, bits: Tensor, share: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bits, ctx.share = inputs
    ctx.save_for_backward(bits)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (bits,) = ctx.saved_tensors
    return drop(grad, bits, ctx.share), None, None


_drop.register_autograd(_backward, setup_context=_save)


def _dropped_levels(dropout: float) -> int:
    return round(float(dropout) * _LEVELS)
