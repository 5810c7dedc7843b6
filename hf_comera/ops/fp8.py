"""Tensors in E4M3, one byte an entry, in groups whose dynamic range is first expanded to what E4M3 has."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["GROUP_SIZE", "decode", "dequantise", "encode", "quantise", "to_groups"]

GROUP_SIZE = 128
"""Entries that share a largest value and an exponent."""

_FORMAT = torch.float8_e4m3fn
_LARGEST, _SMALLEST = 448.0, 2.0**-9
_BINARY_ORDERS = math.log2(_LARGEST / _SMALLEST)
_NO_LOGARITHM = 1000.0
"""Stands for that of zero: more than that of any number, so that it is never the smallest."""

_EXPONENTS = (0.5, 128.0)
"""An exponent below one compresses instead; beyond these, a single tiny entry would cost all others their accuracy,
and entries that are almost equal would ask for more digits than float32 has."""


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
    """What :func:`quantise` took, to its accuracy, in float32.

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
    """What expands the range of each group to that of E4M3; the largest allowed where all entries are equal."""
    smallest = logarithms.amin(-1, keepdim=True)
    return (_BINARY_ORDERS / (largest.log2() - smallest)).clamp(*_EXPONENTS)
