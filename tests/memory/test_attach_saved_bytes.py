"""hf_comera/memory/attach.py: bytes of storages that are alive, each once."""

import pytest
import torch
from torch import nn

from hf_comera.memory import SavedBytes
from hf_comera.modules import TTLinear
from hf_comera.modules.halves_cache import note_parameter_edit
from tests.memory.policy_runs import assert_nothing_left

X = 24 * 32  # bytes of a (4, 6, 8) tensor


def counted(function, x, uncounted=()):
    with SavedBytes(uncounted) as saved:
        result = function(x)
    assert_nothing_left()
    del result
    return saved.total


COUNTS = {  # with the result, a number
    "nothing": (lambda x: x.sum(), 4),
    "input": (lambda x: x.sin().sum(), 4),
    "output": (lambda x: x.exp().sum(), X + 4),
    "twice the same": (lambda x: (y := x + 1) is None or (y * y).sum(), X + 4),
    "a view and all": (lambda x: (y := x + 1) is None or (y[0].sin() * y.view(-1)[:48].view(6, 8)).sum(), X + 196),
    "gone": (lambda x: x.exp().detach().sum(), 4),
    "written to": (lambda x: torch.zeros(24, 32).add_(1).sum(), 4),
}


@pytest.mark.parametrize(("function", "expected"), COUNTS.values(), ids=COUNTS)
def test_counts(function, expected):
    assert counted(function, torch.randn(4, 6, 8, requires_grad=True)) == expected


def test_the_most_at_a_time():
    x = torch.randn(4, 6, 8)
    with SavedBytes() as saved:
        x.sin().sin().sum()
    assert (saved.total, saved.now, saved.peak) == (0, 0, 2 * X)


def test_what_is_there_already_is_not_counted():
    module, x, made = nn.Linear(8, 8), torch.randn(4, 6, 8, requires_grad=True), []
    assert counted(lambda x: module(x).sum(), x) == 4
    later = nn.Parameter(torch.empty(8))
    assert counted(lambda x: made.append(later.detach()), x) == 0
    assert counted(lambda x: made.append(torch.ones(8)), x) == 32


@pytest.mark.parametrize("gates", [False, True], ids=["cores", "gated"])
def test_halves_and_what_they_keep_are_counted_where_they_are_built(gates):
    layer, x = TTLinear(64, 96, ranks=2), torch.randn(6, 64)
    if gates:
        layer.add_rank_gates()
    built = counted(lambda x: layer(x).sum(), x)
    again = counted(lambda x: layer(x).sum(), x)
    assert built > again + 4 * 8 * (64 + 96), "halves"
    assert again == 4 * 6 * 8 + 4, "the latent, and the result"


def test_a_counter_can_be_used_again():
    layer, saved = TTLinear(8, 12, ranks=2, in_factors=(2, 4), out_factors=(3, 4)), SavedBytes()
    layer(torch.ones(6, 8))
    totals = []
    for _ in range(2):
        note_parameter_edit()
        layer.halves_cache.drop_all()
        with saved:
            layer(torch.ones(6, 8)).sum()
        totals.append(saved.total)
    assert totals[0] == totals[1] > 0


def test_one_in_another():
    x = torch.randn(4, 6, 8)
    with SavedBytes() as outer:
        y = x.sin()
        with SavedBytes() as inner:
            z = x.exp()
    assert (outer.total, inner.total) == (2 * X, X)
    assert y.shape == z.shape


def test_a_pass_that_raised_leaves_nothing_behind():
    with pytest.raises(KeyboardInterrupt), SavedBytes():
        raise KeyboardInterrupt
    assert_nothing_left()


def test_gradients_are_those_of_plain_autograd():
    x = torch.randn(4, 6, 8, requires_grad=True)

    def gradients():
        (first,) = torch.autograd.grad(x.exp().mul(x).square().sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.sum(), x)

    expected = gradients()
    with SavedBytes():
        found = gradients()
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
