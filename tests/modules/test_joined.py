"""hf_comera/modules/joined.py: siblings share one product where they read one input, and compute alone elsewhere."""

import copy
import pickle
import threading

import pytest
import torch
from hf_comera.modules.joined import JoinedProjections
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_comera.modules import TTLinear, joined
from hf_comera.ops import tt_linear

pytestmark = pytest.mark.usefixtures("low_rank_path")


class Siblings(nn.Module):
    """Three layers of different ranks and sizes that read one input."""

    def __init__(self, ranks=(5, 5, 9)):
        super().__init__()
        self.query = TTLinear(12, 12, ranks=ranks[0], dtype=torch.float64)
        self.key = TTLinear(12, 6, ranks=ranks[1], bias=False, dtype=torch.float64)
        self.value = TTLinear(12, 6, ranks=ranks[2], dtype=torch.float64)
        group = JoinedProjections()
        for place, layer in enumerate(self.children()):
            layer.join(group, place)

    def forward(self, x, other=None):
        other = x if other is None else other
        return torch.cat([self.query(x), self.key(other), self.value(other)], dim=-1)


def alone(layer, x):
    return tt_linear(x, layer.cores(), len(layer.in_factors), layer.bias, layer.out_features)


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


@pytest.mark.parametrize("ranks", [(5, 5, 5), (1, 12, 5)], ids=["equal", "ragged"])
def test_one_product_gives_what_three_give(ranks, products):
    module = Siblings(ranks)
    for _ in range(2):
        products.clear()
        assert_same_as_alone(module, random_input())
        assert products == [sum(-(-min(rank, limit) // 8) * 8 for rank, limit in zip(ranks, (12, 6, 6), strict=True))]
    assert module.query.joined.num_wasted == 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sibling_on_the_dense_path_leaves_the_others_joined(place, products, dense_path):
    module, x = Siblings(), random_input()
    dense_path(list(module.children())[place])
    for _ in range(2):
        products.clear()
        assert_same_as_alone(module, x)
        assert products == [sum(width for index, width in enumerate((8, 8, 8)) if index != place)]
    assert module.query.joined.num_wasted == 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sibling_without_ranks_leaves_the_others_joined(place, products):
    ranks = [5, 5, 5]
    ranks[place] = [0] * (len(Siblings().query.ranks) if place == 0 else len(Siblings().key.ranks))
    module = Siblings(ranks)
    module(random_input()).sum().backward()
    assert products == [16]
    assert module.query.joined.num_wasted == 0


def test_other_inputs_give_codes_of_their_own(products):
    module = Siblings()
    assert_same_as_alone(module, random_input(), random_input())
    assert len(products) == 3
    assert module.query.joined.num_wasted == 2, "they have met backward without having been asked for"
    module(random_input(), random_input())
    assert module.query.joined.num_wasted == 2, "not yet known: they may still be asked for"
    module(random_input())
    assert module.query.joined.num_wasted == 4


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
    assert group.num_waiting == 0
    assert group._pending is None


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


def test_a_code_is_not_used_once_the_cores_have_changed():
    module, x = Siblings(), random_input()
    with torch.no_grad():
        module.query(x)
        module.key.core_0.mul_(3)
        torch.testing.assert_close(module.key(x), alone(module.key, x))


def test_a_code_is_not_used_outside_the_autocast_region_it_was_made_in():
    module, x = Siblings().float(), random_input().float()
    with torch.autocast("cpu", torch.bfloat16):
        module.query(x)
    assert module.key(x).dtype == torch.float32


def test_backward_between_siblings():
    module, x = Siblings(), random_input()
    for layer in module.children():
        layer(x).sum().backward()
    expected = torch.autograd.grad(reference(module, x).sum(), list(module.parameters()))
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], list(expected))


def test_a_checkpointed_region_that_begins_between_siblings():
    module, x = Siblings(), random_input()
    query = module.query(x)
    rest = checkpoint(lambda z: torch.cat([module.key(z), module.value(z)], -1), x, use_reentrant=False)
    ours = torch.cat([query, rest], -1)
    ours.square().sum().backward()
    expected = torch.autograd.grad(reference(module, x).square().sum(), list(module.parameters()))
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], list(expected))


def test_threads_do_not_get_codes_of_each_other():
    module, wrong = Siblings(), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(150):
                x = torch.randn(3, 12, dtype=torch.float64, generator=generator)
                wrong.append(not torch.allclose(module(x), reference(module, x)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 600
    assert not any(wrong)


def test_copies_keep_the_order_in_which_they_are_called(products):
    """Modules may be registered in another order than that of their calls, as OPT's are."""
    module = Siblings()
    module._modules = dict(reversed(module._modules.items()))
    copied, x = copy.deepcopy(module), random_input()
    for name in ("query", "key", "value"):
        getattr(copied, name)(x)
    assert len(products) == 1
    assert copied.query.joined.num_waiting == 0


def test_a_shallow_copy_of_a_member_is_no_member():
    module = Siblings()
    lonely, x = copy.copy(module.key), random_input()
    torch.testing.assert_close(lonely(x), alone(module.key, x))
    module(x)
    assert module.query.joined.num_waiting == 0
