"""hf_comera/memory/random_draws.py: what was drawn is drawn again, and the generator does not notice."""

import pytest
import torch
from torch.nn import functional

from hf_comera.memory.random_draws import RandomDraws
from hf_comera.ops.bit_mask import BitMask

CPU = torch.device("cpu")
X = torch.ones(5, 7)
QUERY = torch.linspace(-1, 1, 48).view(1, 2, 4, 6)
DRAWS = {  # (call, whether bits are kept)
    "dropout": (lambda: functional.dropout(X, 0.3), True),
    "two dropouts": (lambda: functional.dropout(X, 0.3) + functional.dropout(X, 0.8), True),
    "attention": (lambda: functional.scaled_dot_product_attention(*[QUERY] * 3, dropout_p=0.4), True),
    "nothing": (lambda: X * 2, True),
    "normal": (lambda: X + torch.randn(5, 7), False),
    "dropout and normal": (lambda: functional.dropout(X, 0.3) + torch.randn(5, 7), False),
    "normal and dropout": (lambda: torch.randn(5, 7) + functional.dropout(X, 0.3), False),
    "permutation": (lambda: torch.randperm(20), False),
    "rates of entries": (lambda: torch.bernoulli(X / 2), False),
}


@pytest.mark.parametrize(("call", "as_bits"), DRAWS.values(), ids=DRAWS)
def test_the_same_again(call, as_bits):
    draws = RandomDraws(CPU)
    with draws.recorded():
        first = call()
    assert all(isinstance(item, BitMask) for item in draws.memory) == as_bits
    assert sum(item.nbytes for item in draws.memory) < (40 if as_bits else 6000)
    for _ in range(2):
        torch.randn(3)
        before = torch.get_rng_state()
        with draws.repeated():
            assert torch.equal(call(), first)
        assert torch.equal(torch.get_rng_state(), before)


def test_recording_draws_what_would_be_drawn():
    torch.manual_seed(0)
    expected = functional.dropout(X, 0.3), torch.randn(2)
    torch.manual_seed(0)
    with RandomDraws(CPU).recorded():
        found = functional.dropout(X, 0.3)
    assert torch.equal(found, expected[0])
    assert torch.equal(torch.randn(2), expected[1])


@pytest.mark.parametrize("method", ["recorded", "repeated"])
def test_an_error_inside_leaves_nothing_behind(method):
    draws = RandomDraws(CPU)
    with draws.recorded():
        torch.randn(2)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="planted"), getattr(draws, method)():
        raise ValueError("planted")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
