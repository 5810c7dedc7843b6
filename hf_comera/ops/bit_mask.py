"""Dropout masks in one bit an entry, and back without a difference."""

import torch
from torch import Tensor

__all__ = ["decode_bits", "pack_bits"]

_GATHER = 0x0102040810204080
"""Bit ``56 - 7 j`` for each j: times it, bit ``8 j``, the truth of byte j, comes to ``56 + j``, the last byte."""

_WORDS = {1: torch.int64, 2: torch.complex128}
"""By bytes an entry: a dtype of eight entries, as single words are looked up twice as fast as rows."""


def decode_bits(bits: Tensor, value: Tensor) -> Tensor:
    """``value`` where a bit is set, 0 elsewhere.

    Shape:
        bits ``(..., n)``, uint8, the lowest bit of a byte first; value ``()`` -> ``(..., 8 * n)``.
    """
    # made anew, in microseconds: one kept since a CUDA graph was captured would not outlive the graph
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
