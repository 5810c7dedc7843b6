"""Dropout masks in one bit an entry, and back without a difference."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BitMask", "decode_bits", "pack_bits"]

_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64)

_GATHER = 0x0102040810204080
"""Bit ``56 - 7 j`` for each j: times it, bit ``8 j``, the truth of byte j, comes to ``56 + j``, the last byte."""

_WORDS = {1: torch.int64, 2: torch.complex128}
"""By bytes an entry: a dtype of eight entries, as single words are looked up twice as fast as rows."""


@dataclass(frozen=True, eq=False, slots=True)
class BitMask:
    """A mask with the two values 0 and c, as dropout saves it: c is True, or ``1 / (1 - p)`` in a float dtype."""

    bits: Tensor
    """``(ceil(n / 8),)``, uint8, in the order of the mask in memory; the lowest bit of a byte comes first."""
    value: Tensor
    """c, ``()``, in the dtype of the mask; 0 if all of a float mask is."""
    shape: torch.Size
    """That of the mask."""
    strides: tuple[int, ...]
    """Those of the mask if it fills its memory, otherwise contiguous ones."""

    @classmethod
    @torch.no_grad()
    def of(cls, mask: Tensor) -> "BitMask":
        """Packs a mask. That there are no values but 0 and one c > 0 is not checked; nothing is read from the device.

        Args:
            mask: Bool, float32, bfloat16, float16 or float64, of any shape and layout.

        Raises:
            ValueError: For other dtypes.
        """
        if mask.dtype not in _DTYPES:
            raise ValueError(f"the mask has dtype {mask.dtype}; dropout makes {', '.join(map(str, _DTYPES))}.")
        mask = mask.detach()
        mask = mask if _fills_its_memory(mask) else mask.contiguous()
        flat = mask.as_strided((mask.numel(),), (1,))
        if mask.dtype == torch.bool or not len(flat):
            value = mask.new_ones(())
        else:
            value = flat.amax()
        return cls(pack_bits(flat.bool()), value, mask.shape, mask.stride())

    @property
    def dtype(self) -> torch.dtype:
        """That of the mask."""
        return self.value.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the bits and the value."""
        return self.bits.nbytes + self.value.nbytes

    @torch.no_grad()
    def decode(self) -> Tensor:
        """The mask, in its dtype and strides."""
        return decode_bits(self.bits, self.value).as_strided(self.shape, self.strides)


def _fills_its_memory(mask: Tensor) -> bool:
    """Whether a permutation of the axes is contiguous."""
    order = sorted(range(mask.dim()), key=mask.stride, reverse=True)
    return mask.permute(order).is_contiguous()


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
