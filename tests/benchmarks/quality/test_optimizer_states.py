"""benchmarks/quality/optimizer_states.py: the moments are the optimizer's, and errors of steps are as defined."""

import pytest
import torch
from torch import nn

from benchmarks.quality.optimizer_states import FORMATS, ROUNDINGS, collect_moments, step_error


def moments_of(num_steps):
    layer = nn.Linear(200, 12)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        layer(torch.randn(7, 200)).square().sum().backward()
        optimizer.step()
    return collect_moments([optimizer])


def test_biases_of_the_beginning_are_taken_out():
    m, v = moments_of(1)[0]
    torch.testing.assert_close(m.square(), v, rtol=1e-4, atol=0)


def test_the_error_is_that_of_the_steps():
    """Codes of E4M3 have three bits behind the point: 1.0625 of 448 / 256 goes to 1 or 1.125 of it."""
    m = torch.tensor([[448.0, 1.0625, 0.0]])
    v = torch.full((1, 3), 4.0)
    rounded = FORMATS["e4m3"](m, False)
    assert rounded.tolist() == [[448.0, 1.0, 0.0]]
    expected = 0.0625**2 / (448**2 + 1.0625**2)
    assert step_error([(m, v)], "e4m3", "e4m3", eps=0.0) == pytest.approx(expected, rel=1e-4)
    assert step_error([(m, v), (m, v)], "e4m3", "e4m3", eps=0.0) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", FORMATS)
def test_second_moments_do_not_become_zero(kind):
    v = torch.tensor([[1.0, 1e-12, 0.0]])
    assert (FORMATS[kind](v, True) > 0).tolist() == [[True, True, False]]
    assert not FORMATS[kind](torch.zeros(1, 5), True).any()


def test_the_order_of_the_errors():
    moments = moments_of(20)
    errors = {name: step_error(moments, *kinds) for name, kinds in ROUNDINGS.items()}
    assert errors["both_expanded"] < errors["first_expanded"] < errors["plain"] < errors["plain_e5m2_second"]
    assert errors["both_expanded"] < errors["second_expanded"] < errors["plain"]
