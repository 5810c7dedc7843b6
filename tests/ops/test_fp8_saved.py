"""hf_comera/ops/fp8.py: how far entries come back from what was stored, and which come back exactly."""

import math

import pytest
import torch

from hf_comera.ops import fp8
from hf_comera.ops.fp8 import ACTIVATION_GROUP_SIZE as GROUP_SIZE
from hf_comera.ops.fp8 import Fp8Tensor, store_by_group, store_by_tensor

NAN, INF = math.nan, math.inf
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT32_MAX = torch.finfo(torch.float32).max

STORES = {"by-group": store_by_group, "by-tensor": store_by_tensor}
FORMATS = {  # format, relative error of normal codes, largest code, smallest normal and subnormal code
    "e4m3": (E4M3, 2**-4, 448.0, 2**-6, 2**-9),
    "e5m2": (E5M2, 2**-3, 57344.0, 2**-14, 2**-16),
}
SHAPES = [(), (1,), (15,), (16,), (17,), (3, 40), (5, 1), (2, 3, 48), (4, 1, 2, 33), (0,), (0, 7), (7, 0)]

all_stores = pytest.mark.parametrize("store", STORES.values(), ids=STORES)
all_formats = pytest.mark.parametrize(
    ("format", "relative", "largest", "normal", "subnormal"), FORMATS.values(), ids=FORMATS
)
both_formats = pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def back(values: torch.Tensor, store=store_by_group, format=E4M3) -> torch.Tensor:
    return store(values, format=format).decode()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Also the signs of zeros and the places of NaN."""
    numbers = torch.where(expected.isnan(), 0.0, expected)
    return (
        torch.equal(found.isnan(), expected.isnan())
        and torch.equal(torch.where(found.isnan(), 0.0, found), numbers)
        and torch.equal(found.signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])
    )


@all_stores
@both_formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_dtypes_and_bytes(store, format, shape, device):
    values = torch.randn(shape, device=device)
    stored = store(values, format=format)
    assert isinstance(stored, Fp8Tensor)
    assert (stored.shape, stored.dtype, stored.codes.dtype) == (shape, torch.float32, format)
    assert stored.codes.is_contiguous()
    if store is store_by_tensor:
        assert (stored.scales.shape, stored.scales.dtype) == ((), torch.float32)
        assert stored.nbytes == values.numel() + 4
    else:
        rows = shape or (1,)
        assert stored.scales.shape == (*rows[:-1], -(-rows[-1] // GROUP_SIZE))
        assert stored.scales.dtype == torch.bfloat16
        assert stored.nbytes == values.numel() + 2 * stored.scales.numel()
    found = stored.decode()
    assert (found.shape, found.dtype, found.device) == (values.shape, values.dtype, values.device)
    assert found.is_contiguous()
    torch.testing.assert_close(found, values, rtol=2**-3, atol=2**-9)


@all_stores
@all_formats
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_errors_are_those_of_the_format(store, format, relative, largest, normal, subnormal, spread, device):
    """Half a step, with the scale of largest / 448 at most; float64 is the reference."""
    values = torch.randn(50, 64, device=device) * (spread * torch.randn(50, 64, device=device)).exp()
    groups = values.double().view(-1, GROUP_SIZE if store is store_by_group else values.numel())
    scale = groups.abs().amax(-1, keepdim=True) / largest
    error = (back(values, store, format).double().view_as(groups) - groups).abs()
    assert (error <= (relative * groups.abs()).maximum(subnormal / 2 * scale) * (1 + 1e-6)).all()
    is_normal = groups.abs() >= normal * scale
    assert (error[is_normal] <= relative * groups.abs()[is_normal] * (1 + 1e-6)).all()


@all_stores
@both_formats
def test_decoding_is_torchs_cast_times_the_scale(store, format, device):
    """For every code, NaN and subnormal ones too: on a CPU they do not go through that cast."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(format)
    scales = torch.randn(256 // GROUP_SIZE, device=device).exp() if store is store_by_group else torch.tensor(0.3)
    scales = scales.to(device, torch.bfloat16 if scales.dim() else torch.float32)
    found = Fp8Tensor(codes, scales, torch.float32).decode()
    factors = scales.float().repeat_interleave(GROUP_SIZE) if scales.dim() else scales
    assert same(found, codes.float() * factors)


@all_stores
@both_formats
def test_encoding_is_torchs_cast_of_the_quotient(store, format, device):
    values = torch.randn(40, 64, device=device)
    stored = store(values, format=format)
    scales = stored.scales.float().repeat_interleave(GROUP_SIZE, -1) if stored.scales.dim() else stored.scales
    expected = (values * scales.reciprocal()).to(format)
    assert torch.equal(stored.codes.view(torch.uint8), expected.view(torch.uint8))


def test_the_maximum_of_maxima_of_groups_is_that_of_the_tensor():
    values = torch.randn(40, 64)
    in_two_stages = values.view(-1, GROUP_SIZE).abs().amax(-1).amax()
    torch.testing.assert_close(store_by_tensor(values).scales, in_two_stages / 448, rtol=2**-21, atol=0)


@both_formats
def test_scales_in_bfloat16_cost_next_to_nothing(format):
    values = torch.randn(1000, 64)
    groups = values.view(-1, GROUP_SIZE)
    scale = groups.abs().amax(-1, keepdim=True) / torch.finfo(format).max
    precise = (groups / scale).to(format).float() * scale
    error, precise_error = (back(values, format=format) - values).norm(), (precise - groups).norm()
    assert error <= 1.02 * precise_error


@pytest.mark.parametrize("scale", [1e-37, 1e-38, 1e-20, 1.0, 1e20, 8e37], ids=str)
@all_stores
@all_formats
def test_any_order_of_magnitude(store, format, relative, largest, normal, subnormal, scale):
    values = torch.randn(8, 32).clamp(-4, 4) * scale
    found = back(values, store, format)
    assert found.isfinite().all()
    torch.testing.assert_close(found, values, rtol=relative * 1.0001, atol=scale * subnormal)


@all_stores
@both_formats
@pytest.mark.parametrize("magnitude", [FLOAT32_MAX, 3.39e38, 3e38])
def test_the_largest_magnitudes_do_not_overflow(store, format, magnitude):
    values = magnitude * torch.linspace(-1, 1, 333, dtype=torch.float64)
    found = back(values.float(), store, format)
    assert found.isfinite().all()
    torch.testing.assert_close(found[[0, -1]], values[[0, -1]].float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@all_stores
def test_the_largest_magnitudes_of_short_dtypes_do_not_overflow(store, dtype):
    values = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
    found = back(values, store)
    assert found.isfinite().all()
    torch.testing.assert_close(found, values, rtol=2**-6, atol=0)


@all_stores
def test_codes_never_exceed_the_largest(store):
    """For all mantissas of the largest entry: a scale that is too small would round it to NaN."""
    for values in (torch.linspace(1, 2, 40_001)[:, None], torch.linspace(1e-40, 1e-35, 10_001)[:, None]):
        parts = [values] if store is store_by_group else values[::50].unbind()
        for part in parts:
            found = back(part, store)
            assert found.isfinite().all()
            torch.testing.assert_close(found, part, rtol=2**-4, atol=2**-136)


@all_stores
@both_formats
def test_subnormal_entries_have_errors_below_the_smallest_numbers(store, format):
    values = torch.randn(8, 32) * 1e-39
    assert (back(values, store, format) - values).abs().max() <= 2.0**-130
    assert back(torch.full((3,), 1e-45), store, format).abs().max() <= 1e-45


ZEROS = [torch.zeros(20), -torch.zeros(20), torch.tensor([0.0, -0.0, 3.0, -3.0, 0.0, -0.0])]


@all_stores
@both_formats
@pytest.mark.parametrize("values", ZEROS, ids=["positive", "negative", "among-others"])
def test_zeros_are_exact_with_their_signs(store, format, values):
    found = back(values, store, format)
    assert torch.equal(found[values == 0], values[values == 0])
    assert torch.equal(found.signbit(), values.signbit())


@all_stores
@both_formats
@pytest.mark.parametrize("constant", [1.0, -3.3e-7, 2.7e12])
def test_constant_groups_come_back_within_a_scale(store, format, constant):
    values = torch.full((40,), constant)
    rtol = 1e-6 if store is store_by_tensor else 2**-7
    torch.testing.assert_close(back(values, store, format), values, rtol=rtol, atol=0)


@all_stores
@both_formats
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 7, 39])
def test_what_is_not_finite_spoils_nothing_else(store, format, bad, place, device):
    clean = torch.randn(3, 40, device=device)
    clean[1, place] = 0.0
    values = clean.clone()
    values[1, place] = bad
    expected = back(clean, store, format)
    expected[1, place] = bad if format is E5M2 else NAN
    assert same(back(values, store, format), expected)


@all_stores
@both_formats
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nothing_but_what_is_not_finite(store, format, bad):
    values = torch.full((20,), bad)
    expected = values if format is E5M2 else torch.full((20,), NAN)
    assert same(back(values, store, format), expected)
    assert store(values, format=format).scales.isfinite().all()


@all_stores
def test_beyond_float32_is_infinite(store):
    values = torch.tensor([1.0, 1e300], dtype=torch.float64)
    assert same(back(values, store, E5M2), back(values.float(), store, E5M2).double())
    assert back(values, store, E5M2)[1] == INF


@all_stores
@both_formats
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_stored_as_float32(store, format, dtype, device):
    values = torch.randn(7, 40, device=device).to(dtype)
    found = back(values, store, format)
    assert found.dtype == dtype
    assert torch.equal(found, back(values.float(), store, format).to(dtype))


LAYOUTS = {
    "transposed": lambda x: x.mT,
    "a-transposed-row-of-groups": lambda x: x[0].mT,
    "every-second": lambda x: x[..., ::2],
    "an-offset": lambda x: x.flatten()[3:],
    "expanded": lambda x: x[..., :1].expand(-1, -1, 32),
    "permuted": lambda x: x.permute(2, 0, 1),
}


@all_stores
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_do_not_matter(store, layout):
    values = layout(torch.randn(6, 16, 32))
    assert same(back(values, store), back(values.contiguous(), store))


@all_stores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_do_not_matter(store, dtype, monkeypatch):
    values = torch.randn(13, 40).to(dtype)
    whole = store(values)
    monkeypatch.setattr(fp8, "_PIECE_CPU", 3 * GROUP_SIZE)
    parts = store(values)
    assert torch.equal(parts.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    assert torch.equal(parts.scales, whole.scales)
    assert torch.equal(parts.decode(), whole.decode())


@all_stores
def test_nothing_is_recorded_nor_changed(store):
    values = torch.randn(3, 40, requires_grad=True)
    before = values.detach().clone()
    stored = store(values)
    assert not any(tensor.requires_grad for tensor in (stored.codes, stored.scales, stored.decode()))
    assert torch.equal(values, before)


@all_stores
@both_formats
def test_nothing_is_read_from_the_device(store, format):
    """On the meta device there is nothing to read."""
    found = back(torch.ones(3, 40, dtype=torch.bfloat16, device="meta"), store, format)
    assert (found.shape, found.dtype) == ((3, 40), torch.bfloat16)


@all_stores
def test_what_fp8_does_not_hold_is_refused(store):
    with pytest.raises(ValueError, match=r"format=torch\.float16 is not one of torch\.float8_e4m3fn"):
        store(torch.randn(3), format=torch.float16)
    with pytest.raises(ValueError, match=r"torch\.int64; FP8 holds torch\.float32"):
        store(torch.arange(3))
