"""hf_comera/memory/sources.py: tensors are made once a backward, shared, and let go of when nobody asks any more."""

import threading
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from hf_comera.memory import set_activation_policy
from hf_comera.memory.lineage import Place
from hf_comera.memory.sources import Kept, Packed, Rebuilt, Rerun, Saved, Whole
from hf_comera.ops.bit_mask import BitMask
from tests.memory.policy_runs import EXACT, RANK, Of, run, scalar_of, stacks

PLACES = {  # of a (4, 6) tensor
    "all": lambda base: base,
    "rows": lambda base: base[1:3],
    "columns": lambda base: base[:, 1::2],
    "transposed": lambda base: base.t(),
    "expanded": lambda base: base[None].expand(3, 4, 6),
    "one entry": lambda base: base[2, 3],
    "bits": lambda base: base.view(torch.int32)[1:],
    "bytes": lambda base: base[1].view(torch.uint8)[4:],
    "complex": lambda base: torch.view_as_complex(base.view(4, 3, 2))[1:, 1:],
}


@pytest.mark.parametrize("view", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("offset", [0, 6])
def test_any_place_of_a_kept_or_packed_tensor(view, offset):
    whole = torch.randn(4 * 6 + offset)
    base = whole[offset:].view(4, 6)
    expected = view(base)
    assert torch.equal(Kept(base).at(Place.of(expected)), expected)

    class Stored:
        def decode(self):
            return base.clone()

    found = Packed(Stored(), Place.of(base)).at(Place.of(expected))
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_what_is_decoded_gets_its_layout():
    mask = (torch.rand(6, 4) > 0.5).t()
    found = Packed(BitMask.of(mask.contiguous()), Place.of(mask)).at(Place.of(mask))
    assert torch.equal(found, mask)
    assert found.stride() == mask.stride()


@pytest.mark.parametrize("sort", [Kept, Whole])
def test_what_is_kept_may_not_be_written_to(sort):
    tensor = torch.randn(3)
    source = sort(tensor)
    tensor[1:].add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(3,\) .* is at version 1, expected version 0. Change a copy"):
        Saved(source, Place.of(tensor)).tensor()


class Counted:
    """Counts how often sources of a sort make a tensor, and how many of these are alive at once."""

    def __init__(self, monkeypatch, sort, method):
        self.made, self.most = [], 0
        original = getattr(sort, method)

        def counting(source):
            result = original(source)
            self.made.append(weakref.ref(result))
            self.most = max(self.most, self.num_alive)
            return result

        monkeypatch.setattr(sort, method, counting)

    @property
    def num_alive(self):
        return sum(ref() is not None for ref in self.made)


def three_users(module, x):
    hidden = functional.gelu(module.first(x))
    return module.second(hidden) + hidden * module.second.weight[0] + hidden * hidden


def deep(module, x):
    for _ in range(12):
        x = x + module.second(functional.gelu(module.first(module.norm(x))))
    return x


def test_what_several_ask_for_is_rebuilt_once(monkeypatch):
    counted = Counted(monkeypatch, Rebuilt, "make")
    module, x = Of(three_users), torch.randn(4, 6, 8)
    run(module, {"x": x}, RANK)
    assert len(counted.made) == 1
    assert counted.num_alive == 0


def test_rebuilt_tensors_go_as_backward_goes(monkeypatch):
    counted = Counted(monkeypatch, Rebuilt, "make")
    module = Of(deep)
    set_activation_policy(module, RANK)
    loss = scalar_of(module(torch.randn(4, 6, 8)))
    assert counted.made == []
    loss.backward()
    assert len(counted.made) >= 24
    assert counted.most <= 2 * RANK.depth
    assert counted.num_alive == 0


def attention_with_dropout(module, x):
    query, key = (layer(x).view(4, 6, 4, 2).transpose(1, 2) for layer in (module.first, module.second))
    y = functional.scaled_dot_product_attention(query, key, key, dropout_p=0.2)
    return y.transpose(1, 2).flatten(-2).exp()


RETAINED = {"three users": three_users, "deep": deep, "attention": attention_with_dropout}


@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("use", RETAINED.values(), ids=RETAINED)
def test_a_retained_graph_is_good_for_more_and_holds_no_more(use, policy, monkeypatch):
    counted, rerun = Counted(monkeypatch, Rebuilt, "make"), []
    results = Rerun.results
    monkeypatch.setattr(Rerun, "results", lambda source: rerun.append(weakref.ref(source)) or results(source))
    module, x = Of(use), torch.randn(4, 6, 8, requires_grad=True)
    set_activation_policy(module, policy)
    loss = scalar_of(module(x))
    gradients = []
    for _ in range(3):
        gradients.append(torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=True, allow_unused=True))
        assert counted.num_alive == 0
        assert all(source() is None or source().made is None for source in rerun)
    for again in gradients[1:]:
        assert all(left is right or torch.equal(left, right) for left, right in zip(gradients[0], again, strict=True))
    assert len(rerun) > 0 or use is not attention_with_dropout


@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("use", RETAINED.values(), ids=RETAINED)
def test_gradients_of_gradients(use, policy):
    module, x = Of(use), torch.randn(4, 6, 8, requires_grad=True)

    def penalty():
        torch.manual_seed(1)
        (gradient,) = torch.autograd.grad(scalar_of(module(x)), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, module.first.weight, module.second.weight])

    expected = penalty()
    set_activation_policy(module, policy)
    assert all(torch.equal(left, right) for left, right in zip(penalty(), expected, strict=True))


class Fails(torch.autograd.Function):
    is_on = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.is_on:
            raise ValueError("planted")
        return gradient


@pytest.mark.parametrize("use", RETAINED.values(), ids=RETAINED)
def test_a_backward_that_raised_leaves_nothing_behind(use, monkeypatch):
    counted = Counted(monkeypatch, Rebuilt, "make")
    module = Of(lambda module, x: use(module, Fails.apply(module.first(x))))
    x = torch.randn(4, 6, 8, requires_grad=True)
    monkeypatch.setattr(Fails, "is_on", False)
    expected = run(module, {"x": x}, None)
    monkeypatch.setattr(Fails, "is_on", True)
    with pytest.raises(ValueError, match="planted"):
        run(module, {"x": x}, RANK)
    assert stacks() == (0, None)
    assert counted.num_alive == 0
    monkeypatch.setattr(Fails, "is_on", False)
    found = run(module, {"x": x}, RANK)
    assert torch.equal(found.gradients["x"], expected.gradients["x"])


def test_threads_train_on_their_own():
    """Each keeps its own graph, so that what one forgets after a backward cannot be what another holds."""
    modules = [Of(deep) for _ in range(3)]
    inputs = [torch.randn(4, 6, 8) for _ in modules]
    expected = [run(module, {"x": x}, None).gradients for module, x in zip(modules, inputs, strict=True)]
    start, found = threading.Barrier(len(modules)), {}

    def train(index):
        set_activation_policy(modules[index], RANK)
        start.wait()
        for _ in range(10):
            modules[index].zero_grad()
            loss = scalar_of(modules[index](inputs[index]))
            for retain in (True, False):
                modules[index].zero_grad()
                loss.backward(retain_graph=retain)
        found[index] = {name: parameter.grad for name, parameter in modules[index].named_parameters()}

    threads = [threading.Thread(target=train, args=(index,)) for index in range(len(modules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, gradients in enumerate(expected):
        assert all(torch.equal(found[index][name], gradients[name]) for name in found[index])


def test_a_backward_inside_of_another(monkeypatch):
    """The inner one ends first, and may not make the outer one lose track of what it holds."""
    counted = Counted(monkeypatch, Rebuilt, "make")
    inner = Of(three_users)
    set_activation_policy(inner, RANK)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                scalar_of(inner(torch.ones(4, 6, 8))).backward()
            return gradient

    outer = Of(lambda module, x: three_users(module, Nested.apply(three_users(module, x))))
    set_activation_policy(outer, RANK)
    loss = scalar_of(outer(torch.randn(4, 6, 8, requires_grad=True)))
    loss.backward(retain_graph=True)
    assert len(counted.made) == 3
    assert counted.num_alive == 0


def test_a_module_that_is_gone_is_not_held():
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    set_activation_policy(module, RANK)
    module(torch.randn(2, 8)).sum().backward()
    weight = StorageWeakRef(module[0].weight.untyped_storage())
    del module
    assert weight.expired()
