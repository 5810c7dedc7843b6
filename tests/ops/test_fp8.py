"""hf_comera/ops/fp8.py: what comes back exactly, and how much smaller errors are with the range expanded."""

import math

import pytest
import torch
from torch import nn

from hf_comera.ops.fp8 import GROUP_SIZE, decode, dequantise, encode, quantise, to_groups

NAN, INF = math.nan, math.inf

EXACT = {
    "zeros": torch.zeros(300),
    "constant": torch.full((300,), -3.3e-7),
    "equal-magnitudes": torch.tensor([2.7, -2.7, 0.0, 2.7]),
    "single": torch.tensor([1.2345]),
    "single-in-the-last-group": torch.cat([torch.zeros(GROUP_SIZE), torch.tensor([-7.7])]),
    "zeros-and-one": torch.tensor([0.0, 0.0, 5.1e-12]),
    "empty": torch.zeros(0),
    "below-the-floor-of-the-paper's-code": torch.tensor([1e-38, 0.0, -1e-38]),
    "subnormal": torch.full((3,), 1e-42),
    "largest": torch.full((3,), torch.finfo(torch.float32).max),
    "rows": torch.tensor([[1.5, -1.5], [0.0, 1e9]]),
    "no-rows": torch.zeros(0, 5),
}


@pytest.mark.parametrize("keep_positive", [False, True])
@pytest.mark.parametrize("values", EXACT.values(), ids=EXACT)
def test_exact(values, keep_positive):
    assert torch.equal(dequantise(*quantise(values, keep_positive=keep_positive)), values)


@pytest.mark.parametrize("shape", [(1,), (127,), (128,), (129,), (1000,), (3, 40), (2, 3, 257)])
def test_shapes_and_bytes(shape):
    values = torch.randn(shape)
    codes, scales = quantise(values)
    assert (codes.dtype, codes.shape) == (torch.uint8, shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (*shape[:-1], -(-shape[-1] // GROUP_SIZE), 2))
    back = dequantise(codes, scales)
    torch.testing.assert_close(back, values, rtol=2**-4, atol=1e-3)
    assert torch.equal(back.sign(), values.sign())


def test_groups_do_not_touch_each_other():
    values = torch.randn(3, 200)
    whole = dequantise(*quantise(values))
    for row in range(3):
        for part in (slice(GROUP_SIZE), slice(GROUP_SIZE, None)):
            assert torch.equal(dequantise(*quantise(values[row, part])), whole[row, part])


def test_the_extremes_of_a_group_are_kept():
    values = torch.randn(50, GROUP_SIZE).exp()
    back = dequantise(*quantise(values))
    places = values.argmax(-1, keepdim=True), values.argmin(-1, keepdim=True)
    assert torch.equal(back.gather(1, places[0]), values.gather(1, places[0]))
    torch.testing.assert_close(back.gather(1, places[1]), values.gather(1, places[1]), rtol=1e-4, atol=0)


def test_a_second_pass_changes_next_to_nothing():
    once = dequantise(*quantise(torch.randn(1000)))
    torch.testing.assert_close(dequantise(*quantise(once)), once, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_becomes_nan_and_spoils_nothing_else(bad):
    values = torch.randn(200)
    clean = values.clone()
    values[3], clean[3] = bad, 0.0
    back = dequantise(*quantise(values))
    assert back[3].isnan()
    back[3] = 0.0
    assert torch.equal(back, dequantise(*quantise(clean)))
    assert dequantise(*quantise(torch.full((5,), bad))).isnan().all()


@pytest.mark.parametrize("smallest", [1e-4, 1e-8, 1e-12, 1e-20, 1e-44])
def test_what_is_divided_by_never_becomes_zero(smallest):
    values = torch.tensor([1.0, 0.3, smallest, 0.0])
    back = dequantise(*quantise(values, keep_positive=True))
    assert torch.equal(back > 0, values > 0)
    assert back[2] >= 0.999 * smallest
    torch.testing.assert_close(back[1], values[1], rtol=0.13, atol=0)


def test_far_smaller_entries_of_a_first_moment_become_zero():
    back = dequantise(*quantise(torch.tensor([1.0, -0.3, 1e-20])))
    assert back[2] == 0
    torch.testing.assert_close(back[1], torch.tensor(-0.3), rtol=0.13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_quantised_as_float32(dtype):
    values = torch.randn(300).to(dtype)
    for found, expected in zip(quantise(values), quantise(values.float()), strict=True):
        assert torch.equal(found, expected)


def test_groups_of_any_size():
    values = torch.randn(7, 12)
    assert torch.equal(decode(*encode(values)), dequantise(*quantise(values)))
    assert to_groups(torch.ones(2, 5), 3).tolist() == [[[1, 1, 1], [1, 1, 0]]] * 2


def relative_error(values, **options):
    return ((dequantise(*quantise(values, **options)) - values).norm() / values.norm()).item()


def normal(num_groups=400):
    return torch.randn(num_groups * GROUP_SIZE)


DATA = {
    "normal": (normal, 1.5),
    "log-normal": (lambda: normal().exp(), 2.0),
    "narrow-log-normal": (lambda: (0.3 * normal()).exp(), 5.0),
    "second-moments": (lambda: 1e-9 * (0.5 * normal()).exp(), 3.0),
}


@pytest.mark.parametrize(("make", "factor"), DATA.values(), ids=DATA)
def test_expansion_beats_plain_e4m3(make, factor):
    values = make()
    assert relative_error(values) * factor < relative_error(values, expand=False)


def test_plain_e4m3_is_that_of_torch():
    values = normal(3).view(3, -1)
    scale = values.abs().amax(-1, keepdim=True) / 448
    expected = (values / scale).to(torch.float8_e4m3fn).float() * scale
    found = dequantise(*quantise(values, expand=False))
    # rounding to the other neighbour where a value lies between two codes
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def moments_of_a_training():
    """Of AdamW after 60 steps of a small network."""
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mixing = torch.randn(32, 32)
    for _ in range(60):
        inputs = torch.randn(16, 32)
        (model(inputs) - (inputs @ mixing).sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[parameter] for parameter in model.parameters() if parameter.ndim == 2]
    return [(state["exp_avg"].flatten(), state["exp_avg_sq"].flatten()) for state in states]


def test_errors_of_steps_have_the_order_of_the_paper():
    """COAT, table 1: neither expanded 20.1, second 18.1, first 15.1, both 12.3 (no units)."""

    def error(expand_first, expand_second):
        total = 0.0
        for first, second in moments:
            step = first / (second.sqrt() + 1e-8)
            first_back = dequantise(*quantise(first, expand=expand_first))
            second_back = dequantise(*quantise(second, expand=expand_second, keep_positive=True))
            total += (first_back / (second_back.sqrt() + 1e-8) - step).square().sum().item()
        return total

    moments = moments_of_a_training()
    neither, second, first, both = error(False, False), error(False, True), error(True, False), error(True, True)
    assert both < first < second < neither
    assert 1.6 * both < neither
