"""hf_comera/memory/saved_bytes.py: bytes of storages, each once; with a policy, of what its sources hold."""

import pytest
import torch
from torch import nn

from hf_comera.memory import ActivationPolicy, SavedBytes, set_activation_policy
from hf_comera.modules import TTLinear
from hf_comera.modules.stamp import note_parameter_edit
from tests.memory.policy_runs import RANK, Of, stacks

X = 24 * 32  # bytes of a (4, 6, 8) tensor


def counted(function, x, uncounted=()):
    with SavedBytes(uncounted) as saved:
        result = function(x)
    assert stacks() == (0, None)
    del result
    return saved.total


COUNTS = {
    "nothing": (lambda x: x + 1, 0),
    "input": (lambda x: x.sin(), X),
    "output": (lambda x: x.exp(), X),
    "twice the same": (lambda x: x * x, X),
    "a view and all": (lambda x: (x[0] * x[1]) * x.view(-1)[:48].view(6, 8) * 1.0, X + 6 * 32),
    "sparse": (lambda x: torch.sparse.mm(torch.eye(6).to_sparse(), x[0]), 36 * 4),
    "gone": (lambda x: x.exp().detach(), 0),
}


@pytest.mark.parametrize(("function", "expected"), COUNTS.values(), ids=COUNTS)
def test_without_a_policy(function, expected):
    x = torch.randn(4, 6, 8, requires_grad=True)
    assert counted(function, x) == expected


def test_parameters_are_not_counted():
    module, x = nn.Linear(8, 8), torch.randn(4, 6, 8, requires_grad=True)
    assert counted(module, x) == X + 64 * 4
    assert counted(module, x, module.parameters()) == X


@pytest.mark.parametrize("gates", [False, True], ids=["cores", "gated"])
def test_what_halves_keep_for_their_own_backward_is_counted_where_they_are_built(gates):
    layer, x = TTLinear(16, 24, ranks=2, in_factors=(4, 4), out_factors=(6, 4)), torch.randn(6, 16)
    if gates:
        layer.add_rank_gates()
    cores = [1 * 4 * 2, 2 * 4 * 8, 8 * 6 * 2, 2 * 4 * 1]  # the rank in the middle is padded to 8
    gated = (sum(cores[:3]) + 2 + 8 + 2) * gates
    right_half, code = 8 * 24, 6 * 8
    assert counted(layer, x, [*layer.parameters(), x]) == 4 * (right_half + code + sum(cores) + gated)
    assert counted(layer, x, [*layer.parameters(), x]) == 4 * (right_half + code), "they are there already"


def test_a_counter_can_be_used_again():
    layer, saved = TTLinear(8, 12, ranks=2, in_factors=(2, 4), out_factors=(3, 4)), SavedBytes()
    totals = []
    for _ in range(2):
        note_parameter_edit()
        with saved:
            layer(torch.ones(6, 8)).sum()
        totals.append(saved.total)
    assert totals[0] == totals[1] > 0


def test_with_a_policy():
    def use(module, x):
        return nn.functional.dropout(torch.nn.functional.gelu(module.first(x)), 0.5) @ module.second.weight

    module, x = Of(use), torch.randn(4, 6, 8)
    totals = {}
    for policy in (None, ActivationPolicy(min_bytes=0, dropout="keep"), RANK, ActivationPolicy(min_bytes=2**20)):
        set_activation_policy(module, policy)
        totals[policy] = counted(module, x, module.parameters())
    plain, masks, bits, nothing = totals.values()
    assert plain == nothing == 4 * X  # the input, that of gelu, the mask, what the product takes in
    assert masks == 4 * X  # as the mask belongs to what the product takes in
    assert bits == 2 * X + X // 32 + 4  # one bit an entry, and their value


def test_one_in_another():
    x = torch.randn(4, 6, 8, requires_grad=True)
    with SavedBytes() as outer:
        y = x.sin()
        with SavedBytes() as inner:
            z = x.exp()
    assert (outer.total, inner.total) == (X, X)
    assert y.shape == z.shape


def test_what_was_saved_may_still_not_be_written_to():
    x = torch.randn(4, 6, 8, requires_grad=True)
    with SavedBytes():
        y = x * 2
        z = y * y
    y += 1
    with pytest.raises(RuntimeError, match="is at version 1, expected version 0"):
        z.sum().backward()


def test_gradients_are_those_of_plain_autograd():
    x = torch.randn(4, 6, 8, requires_grad=True)

    def gradients():
        (first,) = torch.autograd.grad(x.exp().mul(x).square().sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.sum(), x)

    expected = gradients()
    with SavedBytes():
        found = gradients()
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
