"""int8 and int4 rows: integers with a scale for each 64 of them, packed into one tensor.

A tensor is taken as a matrix, of its first axis by all others. Integers are symmetric around zero, so that zeros stay
zeros. A packed row is its integers, of int4 two a byte, and then its scales. Scales are bfloat16, which has the range
of float32; integers are chosen for the scale as it is stored.

Packing what was unpacked, in the same dtype, gives the same bytes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "GROUP_SIZE",
    "PACKED_DTYPES",
    "check_packed",
    "dequantise_rows",
    "packed_width",
    "quantise_rows",
    "row_length",
]

GROUP_SIZE = 64
"""Entries of a row that share a scale, the last ones of it fewer; benchmarks/NOTES.md has the error of others."""

PACKED_DTYPES = {torch.int8: 8, torch.uint8: 4}
"""Dtype of a packed tensor: the bits of its integers."""

_LARGEST = {8: 127, 4: 7}
_SCALE_BYTES = 2
_SHRUNK = {8: (), 4: (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)}
"""Parts of the scale at which nothing is clipped, tried for the smallest squared error; with 8 bits none is better."""

_CHUNK_ENTRIES = 1 << 22
"""Entries that are packed at a time, so that a large table needs little memory beside itself."""


@torch.no_grad()
def quantise_rows(values: Tensor, bits: int) -> Tensor:
    """Integers and scales of ``values``, chosen for the smallest squared error, in one tensor.

    Args:
        values: Any floating dtype; the arithmetic is float32.
        bits: 8 or 4.

    Returns:
        int8 for 8 bits, uint8 for 4.

    Shape:
        ``(rows, ...) -> (rows, packed_width(row length, bits))``

    Raises:
        ValueError: If an entry is NaN or infinite, as float32.

    Source:
        Symmetric absmax quantization as in LLM.int8(), arXiv:2208.07339, section 2.1; in groups as Q8_0 and Q4_0 of
        ggml.
    """
    rows = values.detach().reshape(values.shape[0], -1) if values.numel() else values.new_empty(values.shape[0], 0)
    width = rows.shape[1]
    if width == 0 or not rows.shape[0]:
        kind = torch.int8 if bits == 8 else torch.uint8
        return torch.empty(rows.shape[0], packed_width(width, bits), dtype=kind, device=values.device)
    if not rows.float().isfinite().all():
        raise ValueError("entries that are NaN or infinite cannot be stored as integers with a scale")
    step = max(1, _CHUNK_ENTRIES // width)
    chunks = [_pack(rows[start : start + step], bits) for start in range(0, rows.shape[0], step)]
    if values.dtype.itemsize < 4:  # unpacked entries are rounded once more: take the bytes that these give
        chunks = [_pack(_unpack(chunk, width, values.dtype), bits) for chunk in chunks]
    return torch.cat(chunks)


@torch.no_grad()
def dequantise_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows that :func:`quantise_rows` packed.

    Shape:
        ``(rows, packed width) -> (rows, row length)``

    Raises:
        ValueError: If ``packed`` is nothing that :func:`quantise_rows` returns.
    """
    width = row_length(packed)
    if not width or not packed.shape[0]:
        return packed.new_empty(packed.shape[0], width, dtype=dtype)
    return _unpack(packed, width, dtype)


def packed_width(width: int, bits: int) -> int:
    """Bytes of a packed row of ``width`` entries."""
    return -(-width * bits // 8) + _SCALE_BYTES * -(-width // GROUP_SIZE)


def row_length(packed: Tensor) -> int:
    """Entries of a row of ``packed``.

    Raises:
        ValueError: If ``packed`` is nothing that :func:`quantise_rows` returns.
    """
    width = check_packed(packed.dtype, packed.shape)
    if PACKED_DTYPES[packed.dtype] == 8 or not width or not packed.shape[0]:
        return width
    return width - int(packed[0, width // 2 - 1] >> 4 == 0)  # no integer is stored as 0: the row ends before it


def check_packed(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The most entries that a row of a packed tensor of this dtype and shape may have; of int4 there may be one less.

    Raises:
        ValueError: If there is no such packed tensor.
    """
    bits = PACKED_DTYPES.get(dtype)
    if bits is None or len(shape) != 2:
        raise ValueError(f"a tensor of {dtype} and shape {tuple(shape)} holds no packed rows")
    num_bytes = shape[1]
    num_groups = -(-num_bytes // (GROUP_SIZE * bits // 8 + _SCALE_BYTES))
    width = (num_bytes - _SCALE_BYTES * num_groups) * 8 // bits
    if packed_width(width, bits) != num_bytes:
        raise ValueError(f"{num_bytes} bytes are no packed row of int{bits}: integers and scales do not fill them")
    return width


def _pack(rows: Tensor, bits: int) -> Tensor:
    """See :func:`quantise_rows`; ``rows`` is ``(rows, entries)``."""
    num_rows, width = rows.shape
    groups = _grouped(rows.float())
    scales = _best_scales(groups, bits, rows.dtype)
    integers = _integers(groups, scales, bits).view(num_rows, -1)[:, :width]
    scale_bytes = scales.view(num_rows, -1).view(torch.uint8)
    if bits == 8:
        return torch.cat([integers.to(torch.int8), scale_bytes.view(torch.int8)], dim=1)
    codes = F.pad((integers + 8).to(torch.uint8), (0, width % 2))  # 1 to 15, and 0 behind the end of an odd row
    return torch.cat([codes[:, ::2] | codes[:, 1::2] << 4, scale_bytes], dim=1)


def _unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    bits = PACKED_DTYPES[packed.dtype]
    num_bytes = -(-width * bits // 8)
    scales = packed[:, num_bytes:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    integers = packed[:, :num_bytes]
    if bits == 4:
        integers = torch.stack([integers & 15, integers >> 4], dim=-1).view(len(packed), -1)[:, :width].float() - 8
    groups = _grouped(integers.float())
    return (groups * scales.float().unsqueeze(-1)).view(len(packed), -1)[:, :width].to(dtype).contiguous()


def _grouped(rows: Tensor) -> Tensor:
    """``(rows, entries) -> (rows, groups, group size)``, the last group filled up with zeros."""
    return F.pad(rows, (0, -rows.shape[1] % GROUP_SIZE)).view(rows.shape[0], -1, GROUP_SIZE)


def _integers(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    scales = scales.float()
    return (groups / scales.where(scales > 0, 1.0)).round().clamp(-_LARGEST[bits], _LARGEST[bits])


def _best_scales(groups: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Of some scales, the one with the smallest squared error of what is read back in ``dtype``; the first of equals.

    The largest entry of a group becomes the largest integer at all of them. That, and the neighbours of the plain
    scale, make the scale of unpacked entries one of those that are tried for them: it has no error then.

    Shape:
        ``(rows, groups, size) -> (rows, groups, 1)``
    """
    peaks = groups.abs().amax(dim=-1, keepdim=True)
    plain = (peaks / _LARGEST[bits]).bfloat16()
    neighbours = [(plain.view(torch.int16) + step).clamp(min=0).view(torch.bfloat16) for step in (-1, 1)]
    best, smallest = plain, torch.full_like(peaks, torch.inf)
    for scales in (plain, *neighbours, *((peaks * part / _LARGEST[bits]).bfloat16() for part in _SHRUNK[bits])):
        integers = _integers(groups, scales, bits)
        found = (integers * scales.float()).to(dtype).float()
        # relative to the largest entry, whose own square may not be a number of float32
        errors = ((found - groups) / peaks.where(peaks > 0, 1.0)).square().sum(dim=-1, keepdim=True)
        is_better = (errors < smallest) & (integers.abs().amax(dim=-1, keepdim=True) == _LARGEST[bits])
        best, smallest = torch.where(is_better, scales, best), torch.where(is_better, errors, smallest)
    return best
