"""hf_comera/modules/joined.py: siblings share one product where they read one input, and compute alone elsewhere."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_comera.modules import TTLinear, joined
from hf_comera.modules.joined import JoinedProjections
from hf_comera.ops import tt_linear


class Siblings(nn.Module):
    """Three layers of different ranks and sizes that read one input."""

    def __init__(self, ranks=(5, 5, 9), rank_activation=None):
        super().__init__()
        settings = {"dtype": torch.float64, "rank_activation": rank_activation}
        self.query = TTLinear(12, 12, ranks=ranks[0], **settings)
        self.key = TTLinear(12, 6, ranks=ranks[1], bias=False, **settings)
        self.value = TTLinear(12, 6, ranks=ranks[2], **settings)
        group = JoinedProjections()
        for layer in self.children():
            layer.joined = group
            group.add(layer)

    def forward(self, x, other=None):
        other = x if other is None else other
        return torch.cat([self.query(x), self.key(other), self.value(other)], dim=-1)


def alone(layer, x):
    return tt_linear(x, layer.cores(), len(layer.in_factors), layer.bias, layer.out_features, layer.rank_activation)


def reference(module, x, other=None):
    inputs = (x, x if other is None else other, x if other is None else other)
    return torch.cat([alone(layer, each) for layer, each in zip(module.children(), inputs, strict=True)], dim=-1)


@pytest.fixture
def products(monkeypatch):
    """Widths of the products into rank spaces."""
    seen = []
    to_code = joined.to_code
    monkeypatch.setattr(joined, "to_code", lambda x, left: seen.append(left.shape[0]) or to_code(x, left))
    return seen


def random_input():
    return torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)


def assert_same_as_alone(module, *inputs):
    ours, expected = module(*inputs), reference(module, *inputs)
    torch.testing.assert_close(ours, expected)
    tensors, grad = [*inputs, *module.parameters()], torch.randn_like(ours)
    torch.testing.assert_close(torch.autograd.grad(ours, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@pytest.mark.parametrize("rank_activation", [None, "silu"])
@pytest.mark.parametrize("ranks", [(5, 5, 5), (1, 12, 5)], ids=["equal", "ragged"])
def test_one_product_gives_what_three_give(ranks, rank_activation, products):
    module = Siblings(ranks, rank_activation)
    for _ in range(2):
        products.clear()
        assert_same_as_alone(module, random_input())
        assert products == [sum(-(-min(rank, limit) // 8) * 8 for rank, limit in zip(ranks, (12, 6, 6), strict=True))]
    assert module.query.joined.num_wasted == 0


def test_other_inputs_give_codes_of_their_own(products):
    module = Siblings()
    assert_same_as_alone(module, random_input(), random_input())
    assert len(products) == 3
    assert module.query.joined.num_wasted == 0, "not yet known: they may still be asked for"
    module(random_input())
    assert module.query.joined.num_wasted == 2


def test_a_group_whose_codes_were_wasted_stops_joining_at_the_next_change_of_mode(products):
    module = Siblings()
    module(random_input(), random_input())
    module.eval()
    products.clear()
    module(random_input())
    assert len(products) == 3


def test_an_input_that_was_changed_in_place_is_another_one():
    module, x = Siblings(), torch.randn(3, 12, dtype=torch.float64)
    with torch.no_grad():
        module.query(x)
        x.mul_(2)
        torch.testing.assert_close(module.key(x), alone(module.key, x))


def test_codes_made_without_a_gradient_are_not_used_with_one():
    module, x = Siblings(), random_input()
    with torch.no_grad():
        module.query(x)
    y = module.key(x)
    assert y.grad_fn is not None
    torch.testing.assert_close(y, alone(module.key, x))


def test_layers_alone_and_in_another_order_compute_what_they_should():
    module, x = Siblings(), random_input()
    for name in ("value", "key", "key", "query", "query", "value"):
        layer = getattr(module, name)
        torch.testing.assert_close(layer(x), alone(layer, x))


def test_nothing_waits_after_the_last_sibling():
    module = Siblings()
    module(random_input())
    group = module.query.joined
    assert not group._waiting
    assert group._made_from is None


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_join_among_themselves(again, products):
    module = Siblings()
    copied = again(module)
    copied.key.core_0.detach().mul_(2)
    for each in (copied, module):
        products.clear()
        assert_same_as_alone(each, random_input())
        assert len(products) == 1
    lonely = copy.deepcopy(module.query)
    x = random_input()
    torch.testing.assert_close(lonely(x), alone(lonely, x))


def test_a_removed_sibling_leaves_the_others_alone(products):
    module = Siblings()
    module.key = TTLinear(12, 6, ranks=[0] * 5, bias=False, dtype=torch.float64)
    x = random_input()
    torch.testing.assert_close(module(x)[..., :12], alone(module.query, x))
    assert len(products) == 2


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("crosses", [False, True], ids=["one-input", "two-inputs"])
def test_checkpointing_from_the_first_step(use_reentrant, crosses):
    module, x = Siblings(), random_input()
    inputs = (x, random_input()) if crosses else (x,)
    for _ in range(2):
        module.zero_grad()
        checkpoint(module, *inputs, use_reentrant=use_reentrant).square().sum().backward()
        expected = torch.autograd.grad(reference(module, *inputs).square().sum(), list(module.parameters()))
        torch.testing.assert_close([parameter.grad for parameter in module.parameters()], list(expected))


def test_compiled_code_computes_each_alone():
    module, x = Siblings(), random_input()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), reference(module, x))
