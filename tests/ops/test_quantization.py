"""hf_comera/ops/quantization.py: errors of plain rounding or less, sizes as told, equal bytes when packed again."""

import pytest
import torch

from hf_comera.ops.quantization import GROUP_SIZE, dequantise_rows, packed_width, quantise_rows, row_length

SHAPES = [
    (1, 1), (1, 2), (7, 1), (3, 2), (5, 63), (5, 64), (5, 65), (2, 127), (9, 128), (4, 129), (6, 384), (1, 1536),
    (1, 8, 30), (30, 6, 30), (30, 12, 1), (1, 7, 5, 9), (3, 5, 7, 1), (4, 3, 8, 8),
]  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LARGEST = {8: 127, 4: 7}


def values(shape, dtype=torch.float32, scale=0.05):
    """Normal entries, with an outlier in one of ten rows."""
    drawn = torch.randn(shape, dtype=torch.float64) * scale
    drawn[::10] *= 1 + 9 * (torch.rand_like(drawn[::10]) < 0.02)
    return drawn.to(dtype)


def reference(x, bits):
    """Step of each entry: the largest of its group over the largest integer, in float64."""
    rows = x.double().reshape(len(x), -1)
    parts = [part.abs().amax(dim=1, keepdim=True).expand_as(part) for part in rows.split(GROUP_SIZE, dim=1)]
    return rows, torch.cat(parts, dim=1) / LARGEST[bits]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_no_larger_than_those_of_plain_rounding(shape, bits, dtype):
    x = values(shape, dtype)
    packed = quantise_rows(x, bits)
    rows, steps = reference(x, bits)
    assert packed.shape == (shape[0], packed_width(rows.shape[1], bits))
    assert packed.dtype == {8: torch.int8, 4: torch.uint8}[bits]
    assert row_length(packed) == rows.shape[1]
    found = dequantise_rows(packed, torch.float64)
    plain = (rows / steps.where(steps > 0, 1.0)).round() * steps
    for part, wanted, nearest in zip(*(x.split(GROUP_SIZE, dim=1) for x in (found, rows, plain)), strict=True):
        largest = wanted.abs().amax(dim=1)
        best, roundings = (nearest - wanted).square().sum(dim=1), largest.square() * part.shape[1] * 2.0**-14
        assert ((part - wanted).square().sum(dim=1) <= best + roundings).all()
        if bits == 8:  # the search of int4 clips large entries for the sake of others
            assert ((part - wanted).abs().amax(dim=1) <= 2 * largest / 127).all()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-8, 1e-6, 3e-5, 0.02, 1.0, 3e3, 1e38])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_packing_what_was_unpacked_gives_the_same_bytes(bits, dtype, scale):
    for shape in ((64, 384), (40, 65), (30, 8, 30), (50, 1), (50, 3), (300, 2)):
        largest = 0.5 * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).max
        x = (torch.randn(shape, dtype=torch.float64) * scale).clamp(-largest, largest).to(dtype)
        packed = quantise_rows(x, bits)
        unpacked = dequantise_rows(packed, dtype)
        assert unpacked.isfinite().all()
        assert torch.equal(quantise_rows(unpacked.view(shape), bits), packed)
        assert torch.equal(dequantise_rows(packed, dtype), unpacked)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_can_be_the_largest_of_a_row(bits, dtype):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    rows = torch.stack([every, every / 2, -every / 3, every / 100, torch.zeros_like(every)], dim=1)
    packed = quantise_rows(rows, bits)
    unpacked = dequantise_rows(packed, dtype)
    assert unpacked.isfinite().all()
    assert torch.equal(quantise_rows(unpacked, bits), packed)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_rows_of_zeros_are_taken(bits):
    x = values((6, 100))
    x[2], x[:, 7], x[4, 64:] = 0, 0, 0
    found = dequantise_rows(quantise_rows(x, bits), torch.float32)
    assert (found[x == 0] == 0).all()
    assert (found[5] != 0).any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (0, 3, 4), (0, 64)], ids=str)
def test_nothing_is_taken_too(bits, shape):
    packed = quantise_rows(torch.empty(shape), bits)
    assert packed.shape[0] == shape[0]
    assert dequantise_rows(packed, torch.bfloat16).numel() == 0


def test_the_search_makes_the_error_of_int4_smaller():
    x = values((200, 384))
    rows, steps = reference(x, 4)
    plain = ((rows / steps).round() * steps - rows).square().sum()
    found = (dequantise_rows(quantise_rows(x, 4), torch.float64) - rows).square().sum()
    assert found < 0.92 * plain


def test_chunks_change_nothing(monkeypatch):
    x = values((37, 70))
    whole = [quantise_rows(x, bits) for bits in (8, 4)]
    monkeypatch.setattr("hf_comera.ops.quantization._CHUNK_ENTRIES", 500)
    assert all(torch.equal(quantise_rows(x, bits), packed) for bits, packed in zip((8, 4), whole, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e300])
@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_that_are_none_are_refused(bits, bad):
    x = values((3, 5), torch.float64)
    x[1, 2] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantise_rows(x, bits)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (torch.zeros(3, 4), "float32 and shape"),
        (torch.zeros(3, dtype=torch.int8), r"shape \(3,\)"),
        (torch.zeros(3, 4, 5, dtype=torch.uint8), r"shape \(3, 4, 5\)"),
        (torch.zeros(3, 1, dtype=torch.int8), "1 bytes are no packed row of int8"),
        (torch.zeros(3, 2, dtype=torch.int8), "2 bytes are no packed row of int8"),
        (torch.zeros(3, 1, dtype=torch.uint8), "1 bytes are no packed row of int4"),
        (torch.zeros(3, 2, dtype=torch.uint8), "2 bytes are no packed row of int4"),
        (torch.zeros(3, 67, dtype=torch.int8), "67 bytes are no packed row of int8"),
        (torch.zeros(3, 35, dtype=torch.uint8), "35 bytes are no packed row of int4"),
        (torch.zeros(3, 36, dtype=torch.uint8), "36 bytes are no packed row of int4"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{value.dtype}-{tuple(value.shape)}",
)
def test_what_is_no_packed_tensor_is_refused(packed, message):
    with pytest.raises(ValueError, match=message):
        dequantise_rows(packed, torch.float32)


def test_every_length_of_a_row_is_told_from_its_bytes():
    for width in range(1, 300):
        for bits in (8, 4):
            packed = quantise_rows(torch.ones(2, width), bits)
            assert (packed.shape[1], row_length(packed)) == (packed_width(width, bits), width)
