"""FP8 values in groups with a scale each: optimizer states with expanded range, and activations saved for backward.

The two forms are COAT's mixed granularity. Inputs of norms and activation functions are stored by group, since some of
their channels are far larger than others. Inputs of products are stored by tensor.

Source: COAT, arXiv:2410.19313, section 5. It makes these tensors in the kernels that compute them and multiplies in
FP8; here they are only stored so.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "ACTIVATION_GROUP_SIZE",
    "GROUP_SIZE",
    "Fp8Tensor",
    "decode",
    "dequantise",
    "encode",
    "quantise",
    "store_by_group",
    "store_by_tensor",
    "to_groups",
]

GROUP_SIZE = 128
"""Entries that share a largest value and an exponent."""

_FORMAT = torch.float8_e4m3fn
_LARGEST, _SMALLEST = 448.0, 2.0**-9
_BINARY_ORDERS = math.log2(_LARGEST / _SMALLEST)
_NO_LOGARITHM = 1000.0
"""Placeholder for log2(0): above every real exponent, so that zeros never become the minimum of a group."""

_EXPONENTS = (0.5, 128.0)
"""An exponent below one compresses instead. Below the first, a single tiny entry would cost all others their accuracy.
Above the second, entries that are almost equal would ask for more digits than float32 has."""


def quantise(values: Tensor, *, keep_positive: bool = False, expand: bool = True) -> tuple[Tensor, Tensor]:
    """Each row in groups of :data:`GROUP_SIZE`, the last one as short as it comes out.

    Args:
        values: Any float dtype; the arithmetic is float32.
        keep_positive: See :func:`encode`.
        expand: See :func:`encode`.

    Returns:
        Codes and scales, as :func:`encode` gives them.

    Shape:
        ``(..., n)`` -> codes ``(..., n)``, scales ``(..., ceil(n / 128), 2)``
    """
    num_entries = values.shape[-1]
    groups = to_groups(values.float(), GROUP_SIZE)
    codes, scales = encode(groups, keep_positive=keep_positive, expand=expand)
    return codes.flatten(-2)[..., :num_entries].contiguous(), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The input of :func:`quantise`, to its accuracy, in float32.

    Shape:
        codes ``(..., n)``, scales ``(..., ceil(n / 128), 2)`` -> ``(..., n)``
    """
    return decode(to_groups(codes, GROUP_SIZE), scales).flatten(-2)[..., : codes.shape[-1]]


def to_groups(values: Tensor, size: int) -> Tensor:
    """Rows cut into groups; the last one of each is filled up with zeros, which no group takes note of.

    Shape:
        ``(..., n)`` -> ``(..., ceil(n / size), size)``
    """
    num_groups = -(-values.shape[-1] // size)
    lacking = num_groups * size - values.shape[-1]
    padded = F.pad(values, (0, lacking)) if lacking else values
    return padded.reshape(*values.shape[:-1], num_groups, size)


def encode(groups: Tensor, *, keep_positive: bool = False, expand: bool = True) -> tuple[Tensor, Tensor]:
    """The entries x of a group as ``e4m3(448 * sign(x) * (|x| / largest) ** exponent)``.

    The exponent is ``log2(448 / 2**-9) / log2(largest / smallest)``, so that the group fills the range of E4M3; the
    smallest is that of the entries that are not zero. Relative errors shrink by the exponent, which is about 2 for
    first moments of Adam and more for second ones. Exact are zero, the largest magnitude, and so groups of one entry
    or of entries of equal magnitude. NaN and infinity become NaN and leave the rest of their group alone. Nothing is
    read from the device.

    Args:
        groups: Float32.
        keep_positive: Entries that are not zero do not become zero, but at least the smallest code: for second
            moments, by whose roots is divided. Otherwise magnitudes below about 2**-37 of the largest are rounded to
            zero.
        expand: False for plain E4M3, an exponent of one.

    Returns:
        Codes as ``uint8``, the bits of E4M3; and for each group the largest magnitude and one over the exponent,
        float32.

    Shape:
        ``(..., size)`` -> codes ``(..., size)``, scales ``(..., 2)``

    Source:
        COAT, arXiv:2410.19313, section 4: dynamic range expansion. Its centre and scale cancel,
        ``((|x| / c) ** k) / s = 448 * (|x| / largest) ** k`` for every centre c; so neither is stored.
    """
    # In place where it can be: fresh memory costs a CPU more than most of these calls.
    numbers = groups.abs().nan_to_num_(0.0, 0.0, 0.0)
    largest = numbers.amax(-1, keepdim=True)
    logarithms = numbers.log2_().nan_to_num_(neginf=_NO_LOGARITHM)
    exponent = _exponent(logarithms, largest) if expand else torch.ones_like(largest)
    logarithms.sub_(torch.where(largest > 0, largest, 1.0).log2()).clamp_max_(0.0)
    scaled = logarithms.mul_(exponent).exp2_().mul_(_LARGEST)
    scaled.add_(groups, alpha=0)  # what is not finite becomes NaN
    if keep_positive:
        scaled.clamp_min_(_SMALLEST)
    signed = scaled.mul_(groups.sign())  # also puts the zeros back
    codes = signed.to(_FORMAT).view(torch.uint8)
    return codes, torch.cat([largest, exponent.reciprocal()], -1)


def decode(codes: Tensor, scales: Tensor, *, has_signs: bool = True) -> Tensor:
    """The entries that :func:`encode` took, to its accuracy: ``sign(q) * (|q| / 448) ** (1 / exponent) * largest``.

    Args:
        codes: As they came.
        scales: As they came.
        has_signs: False where no entry is negative, which is cheaper.

    Shape:
        codes ``(..., size)``, scales ``(..., 2)`` -> ``(..., size)``, float32
    """
    largest, inverse = scales.split(1, -1)
    # All codes are few: a cast from E4M3 is slow on a CPU, and a logarithm is not cheap either.
    all_codes = torch.arange(256, dtype=torch.uint8, device=codes.device).view(_FORMAT).float()
    logarithms = all_codes.abs_().div_(_LARGEST).log2_()
    expanded = logarithms.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    expanded.mul_(inverse).exp2_().mul_(largest)
    return expanded.copysign_(codes.view(torch.int8).float()) if has_signs else expanded


def _exponent(logarithms: Tensor, largest: Tensor) -> Tensor:
    """The power that expands each group to the range of E4M3; the largest allowed where all entries are equal."""
    smallest = logarithms.amin(-1, keepdim=True)
    return (_BINARY_ORDERS / (largest.log2() - smallest)).clamp(*_EXPONENTS)


ACTIVATION_GROUP_SIZE = 16
"""Neighbours on the last axis that share a scale."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST_OF = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

_SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of float32 and bfloat16: smaller ones have few digits, and no reciprocal in float32."""

_PIECE_CPU, _PIECE_ELSEWHERE = 1 << 18, 1 << 24
"""Entries at a time. On a CPU they stay in a core's cache from one operation to the next. So does the workspace, which
all pieces share: a fresh one costs more than an operation. Elsewhere, few launches."""


@dataclass(frozen=True, eq=False, slots=True)
class Fp8Tensor:
    """A tensor in one byte an entry and its scales; made by :func:`store_by_group` and :func:`store_by_tensor`."""

    codes: Tensor
    """In the shape of the tensor, contiguous, ``float8_e4m3fn`` or ``float8_e5m2``."""
    scales: Tensor
    """The factors of codes: bfloat16, ``(..., ceil(n / 16))``, by group; float32, ``()``, by tensor."""
    dtype: torch.dtype
    """That of the tensor."""

    @property
    def shape(self) -> torch.Size:
        """That of the tensor."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @torch.no_grad()
    def decode(self) -> Tensor:
        """The tensor, to the accuracy of its format, contiguous."""
        if not self.scales.dim():
            return _decode(self.codes.view(-1), self.scales, self.dtype).view(self.shape)
        rows = self.codes if self.codes.dim() else self.codes.view(1)
        groups = to_groups(rows.view(torch.uint8), ACTIVATION_GROUP_SIZE).view(self.codes.dtype)
        back = _decode(groups.view(-1, ACTIVATION_GROUP_SIZE), self.scales.view(-1, 1), self.dtype).view(groups.shape)
        return back.flatten(-2)[..., : rows.shape[-1]].contiguous().view(self.shape)


@torch.no_grad()
def store_by_group(values: Tensor, *, format: torch.dtype = torch.float8_e4m3fn) -> Fp8Tensor:
    """Entries divided by a scale of their group: ``largest / 448``, or ``/ 57344`` in E5M2.

    Relative errors are at most 2**-4 in E4M3 and 2**-3 in E5M2, down to 2**-14 and 2**-29 of the largest magnitude of
    the group. Below that, absolute errors are at most 2**-10 and 2**-17 of the scale. Scales are rounded towards zero:
    then the largest entry, a little above the largest code, is rounded to it, and codes times scales never overflow.
    No scale is below 2**-126, which costs only magnitudes below about 2e-40 their accuracy. Zeros keep their sign.

    NaN stays NaN. So does what is infinite, also to float32, become NaN in E4M3, which has no infinity; in E5M2 it
    stays as it is. Either way all other entries are what they would be without it. Nothing is read from the device.

    Args:
        values: Float32, bfloat16, float16 or float64, of any shape and layout; the arithmetic is float32.
        format: ``torch.float8_e4m3fn``, or ``torch.float8_e5m2`` for gradients.

    Returns:
        1.125 bytes an entry, if the last axis is a multiple of 16.

    Shape:
        ``(..., n)`` -> codes ``(..., n)``, scales ``(..., ceil(n / 16))``; of ``()`` as of ``(1,)``

    Raises:
        ValueError: For other dtypes and formats.

    Source:
        COAT, arXiv:2410.19313, section 5.1.
    """
    _check(values, format)
    rows = values if values.dim() else values.view(1)
    shaped = to_groups(rows, ACTIVATION_GROUP_SIZE)
    groups = shaped.reshape(-1, ACTIVATION_GROUP_SIZE).contiguous()
    codes = torch.empty(groups.shape, dtype=format, device=values.device)
    scales = torch.empty((len(groups), 1), dtype=torch.bfloat16, device=values.device)
    for piece, part, room in _pieces(groups):
        bits = _scale(_largest(part, room, -1), format).view(torch.int32)
        # the first half of float32 is bfloat16, rounded towards zero
        scales[piece] = bits.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
        _encode(part, room, scales[piece].float(), codes[piece])
    kept = codes.view(torch.uint8).view(shaped.shape).flatten(-2)[..., : rows.shape[-1]].contiguous()
    return Fp8Tensor(kept.view(format).view(values.shape), scales.view(shaped.shape[:-1]), values.dtype)


@torch.no_grad()
def store_by_tensor(values: Tensor, *, format: torch.dtype = torch.float8_e4m3fn) -> Fp8Tensor:
    """As :func:`store_by_group`, with one float32 scale for all entries.

    The largest magnitude is found in two stages, COAT's Group Scaling: of groups, then of these. There a group is 16
    neighbours, and the kernel that makes the values finds the largest of each. So only a sixteenth of the tensor is
    read once more. Here nothing is fused; groups are as large as the cache of a core, where a maximum costs a fifth of
    one of 16. The result is the same, maxima may be taken in any order.

    Shape:
        ``(...)`` -> codes ``(...)``, scale ``()``

    Raises:
        ValueError: For other dtypes and formats.

    Source:
        COAT, arXiv:2410.19313, section 5.2.
    """
    _check(values, format)
    flat = values.reshape(-1).contiguous()
    codes = torch.empty(flat.shape, dtype=format, device=values.device)
    maxima = [_largest(part, room) for _, part, room in _pieces(flat)]
    scale = _scale(torch.stack(maxima or [codes.new_zeros((), dtype=torch.float32)]).amax(), format)
    for piece, part, room in _pieces(flat):
        _encode(part, room, scale, codes[piece])
    return Fp8Tensor(codes.view(values.shape), scale, values.dtype)


def _check(values: Tensor, format: torch.dtype) -> None:
    if format not in _LARGEST_OF:
        raise ValueError(f"format={format} is not one of {', '.join(map(str, _LARGEST_OF))}.")
    if values.dtype not in _DTYPES:
        raise ValueError(f"values have dtype {values.dtype}; FP8 holds {', '.join(map(str, _DTYPES))}.")


def _step(groups: Tensor) -> int:
    """How much of the first axis is worked on at a time."""
    entries = _PIECE_CPU if groups.device.type == "cpu" else _PIECE_ELSEWHERE
    return entries // (groups.shape[1] if groups.dim() > 1 else 1)


def _pieces(groups: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of the first axis, what is there in float32, and room for as much."""
    step = _step(groups)
    room = torch.empty_like(groups[:step], dtype=torch.float32)
    wide = None if groups.dtype == torch.float32 else torch.empty_like(room)
    for start in range(0, len(groups), step):
        part = groups[start : start + step]
        yield (
            slice(start, start + step),
            part if wide is None else wide[: len(part)].copy_(part),
            room[: len(part)],
        )


def _largest(values: Tensor, room: Tensor, *axes: int) -> Tensor:
    """The largest finite magnitude, 0.0 if there is none; over one axis, which is kept, or over all.

    Bits of floats are in the order of their magnitudes; adding one to the exponent makes negative integers of NaN and
    infinity. Integers have faster maxima than floats, which look for NaN, and masking costs more than all of this.
    """
    one = 1 << 23
    bits = torch.bitwise_and(values.view(torch.int32), 0x7FFFFFFF, out=room.view(torch.int32)).add_(one)
    largest = bits.amax(axes, keepdim=bool(axes))
    return largest.clamp_min_(one).sub_(one).view(torch.float32)


def _scale(largest: Tensor, format: torch.dtype) -> Tensor:
    """A little too small, so that the largest code times the scale cannot be rounded to more than ``largest``."""
    return largest.mul((1 - 2.0**-22) / _LARGEST_OF[format]).clamp_min_(_SMALLEST_SCALE)


def _encode(values: Tensor, room: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Writes the codes of float32 values."""
    scaled = torch.mul(values, scale.reciprocal(), out=room)
    if codes.dtype == torch.float8_e4m3fn:
        scaled.nan_to_num_(torch.nan, torch.nan, torch.nan)  # a CPU casts infinity to the largest code
    codes.copy_(scaled)


def _decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times scales, float32 and then ``dtype``."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    step = _step(codes)
    halves = torch.empty_like(codes[:step], dtype=torch.float16)
    wide = None if dtype == torch.float32 else torch.empty_like(halves, dtype=torch.float32)
    for start in range(0, len(codes), step):
        back = out[start : start + step]
        part = back if wide is None else wide[: len(back)]
        factor = _widen(codes[start : start + step], halves[: len(back)], part)
        part.mul_((scales[start : start + step] if scales.dim() else scales).float() * factor)
        if part is not back:
            back.copy_(part)
    return out


def _widen(codes: Tensor, halves: Tensor, out: Tensor) -> float:
    """Writes codes as float32; returns what is left to multiply by.

    On a CPU the cast from E4M3 takes longer than all else, so codes become float16 by shifts. Those of E5M2 are its
    first byte. With E4M3's three bits of mantissa and four of exponent in place, the exponent lacks 8, which is the
    factor 2**8; subnormal codes become subnormal. Of all codes only NaN, 0x7F, carries when one is added; the carry
    completes the exponent of float16 that means NaN there.
    """
    if codes.device.type != "cpu":
        out.copy_(codes)
        return 1.0
    bits = halves.view(torch.int16).copy_(codes.view(torch.int8))
    if codes.dtype == torch.float8_e5m2:
        bits.bitwise_left_shift_(8)
        out.copy_(halves)
        return 1.0
    bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign had been spread over bits 15 and 14
    carries = out.view(torch.int16).flatten()[: bits.numel()].view(bits.shape)  # not in use yet
    bits.bitwise_or_(torch.add(bits, 1 << 7, out=carries).bitwise_and_(0x4000))
    out.copy_(halves)
    return 256.0
