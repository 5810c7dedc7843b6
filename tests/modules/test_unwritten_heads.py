"""hf_comera/modules/unwritten_heads.py: attention over codes is taken, and anything else gets the real tensors."""

import copy
import pickle

import pytest
import torch
from hf_comera.modules.unwritten_heads import UnwrittenHeads
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.modules.attention_blocks import HEADS, SIZE, Attention, attend, random_input, results, split
from tests.modules.conftest import watched
from tests.modules.custom_functions import Doubled

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def uses(monkeypatch):
    return watched(monkeypatch, UnwrittenHeads, "code", "_made")


@pytest.mark.usefixtures("draws_of_torch")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}, {"dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": False},
        {"ranks": (7, 7, 7)},
        {"ranks": (2, 5, 7)},
        {"ranks": (8, 8, 8), "bias": False},
        {"ranks": ([0] * 5, [0] * 5, 5)},
        {"ranks": (5, 5, [0] * 5)},
        {"ranks": (5, [0] * 5, 5), "bias": False},
    ],
    ids=str,
)
def test_equals_attention_of_real_tensors(settings, options, uses):
    block, x = Attention(**settings), random_input()
    block.options = options
    found = results(block, x, True)
    assert uses == ["code"]
    torch.testing.assert_close(found, results(block, x, False))
    assert uses == ["code"]


def test_attention_of_biases_alone(uses):
    block, x = Attention(ranks=([0] * 5,) * 3), random_input()
    block.set_codes(True)
    found = block(x)
    assert uses == ["code"]
    block.set_codes(False)
    torch.testing.assert_close(found, block(x))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda block: Attention(ranks=(5, 8, 5)), "a code with its bias is wider than a head"),
        (lambda block: setattr(type(block.v), "prefers_dense", property(lambda layer: layer is block.v)), "dense"),
        (lambda block: setattr(block.group.attention, "_attn_implementation", "eager"), "core attention is eager"),
        (lambda block: setattr(block.group.attention, "num_attention_heads", 5), "heads do not fit"),
        (lambda block: block.k.register_forward_hook(lambda *args: None), "somebody watches"),
    ],
)
def test_codes_stay_away_from_all_where_one_cannot(spoil, why, uses):
    block = Attention()
    block.set_codes(True)
    other = spoil(block)
    if isinstance(other, Attention):
        block = other
        block.set_codes(True)
    assert not any(isinstance(layer(random_input()), UnwrittenHeads) for layer in (block.q, block.k, block.v)), why
    assert uses == []


EMPTY = torch.empty(0, dtype=torch.float64)


def by_hand(query, key, value):
    context = (query @ key.transpose(2, 3) / SIZE**0.5).softmax(-1) @ value
    return context.transpose(1, 2).flatten(2)


def gate_without_gradient(x):
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


def hooked(x):
    x.register_hook(lambda grad: 3 * grad)
    return x


USES = {
    "scaled": lambda x: x * 2,
    "scaled in place": lambda x: x.mul_(2),
    "index": lambda x: x[:, :] * 1,
    "another view": lambda x: x.view(-1, HEADS * SIZE).view(x.shape),
    "in heads and back": lambda x: x.view(2, 5, HEADS, SIZE).view(2, 5, -1),
    "moved": lambda x: x.view(2, 5, HEADS, SIZE).permute(0, 2, 1, 3).transpose(2, 1).flatten(2),
    "two at once": lambda x: torch.cat([x, x])[:2],
    "norm": lambda x: functional.layer_norm(x, (HEADS * SIZE,)),
    "custom function": Doubled.apply,
    "gate without gradient": gate_without_gradient,
    "hook": hooked,
    "checkpointed": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
}
ATTENTIONS = {
    "by hand": by_hand,
    "real value": lambda query, key, value: attend(query, key, value * 1),
    "tokens cut": lambda query, key, value: attend(query, key[:, :, :3], value[:, :, :3]),
    "cache": lambda query, key, value: attend(query, torch.cat([key, key], -2), torch.cat([value, value], -2)),
    "groups": lambda query, key, value: attend(query, key, value, enable_gqa=True),
    "context changed": lambda query, key, value: attend(query, key, value) + 1,
    "context changed in place": lambda query, key, value: attend(query, key, value).clone().mul_(2),
    "context twice": lambda query, key, value: sum(2 * [attend(query, key, value)]),
    "custom function": lambda query, key, value: Doubled.apply(attend(query, key, value)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whatever_else_is_done_is_done_with_the_real_tensor(use):
    block, x = Attention(use=use), random_input()
    torch.testing.assert_close(results(block, x, True), results(block, x, False))


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_any_attention(attention):
    block, x = Attention(attend=attention), random_input()
    torch.testing.assert_close(results(block, x, True), results(block, x, False))


@pytest.mark.parametrize(
    "mask",
    [torch.ones(5, 5, dtype=torch.int64), torch.ones(4, 1, 5, 5, dtype=torch.bool), torch.zeros(1, 1, 1, 2, 5, 5)],
)
def test_masks_that_torch_refuses_are_refused(mask):
    block = Attention()
    block.options = {"attn_mask": mask, "dropout_p": 0.2}
    for in_codes in (False, True):
        block.set_codes(in_codes)
        with pytest.raises(RuntimeError):
            block(random_input())


def test_questions_are_answered_without_making_it(uses):
    block, x = Attention(), random_input()
    block.set_codes(True)
    query = split(block.q(x))
    context = functional.scaled_dot_product_attention(query, split(block.k(x)), split(block.v(x)))
    for one in (query, context):
        assert isinstance(one, UnwrittenHeads)
        assert (one.shape, one.dtype, one.device, one.dim()) == ((2, HEADS, 5, SIZE), torch.float64, x.device, 4)
        assert (one.size(-1), one.numel(), one.requires_grad) == (SIZE, 240, True)
        assert "UnwrittenHeads" in repr(one)
    assert uses == []


@pytest.mark.parametrize(
    ("cut", "in_codes"),
    [
        (lambda x: x.split(2 * SIZE, dim=2), True),
        (lambda x: x.split(SIZE, -1), True),
        (lambda x: x.split(SIZE - 1, dim=2), False),
        (lambda x: x.split([SIZE, 2 * SIZE], dim=2), False),
        (lambda x: x.split(3, dim=1), False),
        (lambda x: x.chunk(3, dim=2), False),
        (lambda x: split(x).split(1, dim=1), False),
        (lambda x: [torch.cat([EMPTY, split(x)], dim=-2)], True),
        (lambda x: [torch.cat((EMPTY, EMPTY, split(x)), 2)], True),
        (lambda x: [torch.cat([split(x).detach() * 1, split(x)], dim=-2)], False),
        (lambda x: [torch.cat([EMPTY, x], dim=1)], False),
        (lambda x: [torch.cat([split(x)], dim=1)], False),
    ],
)
def test_parts_and_what_a_cache_begins_with(cut, in_codes, uses):
    block, x = Attention(), random_input()
    block.set_codes(True)
    found = cut(block.q(x))
    assert all(isinstance(part, UnwrittenHeads) for part in found) == in_codes
    block.set_codes(False)
    expected = cut(block.q(x))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one * 1, other)
        pair = [torch.autograd.grad(y.square().sum(), block.q.parameters(), retain_graph=True) for y in (one, other)]
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, uses):
    block, x = Attention().eval(), random_input()
    with mode():
        block.set_codes(True)
        y = block(x)
        block.set_codes(False)
        torch.testing.assert_close(y, block(x))
    assert uses == ["code"]
    assert not y.requires_grad


def test_what_is_made_without_gradient_trains_nothing_before_it():
    block, x = Attention(), random_input()
    block.set_codes(True)
    with torch.no_grad():
        wides = [split(layer(x)) for layer in (block.q, block.k, block.v)]
    block.o(attend(*wides)).sum().backward()
    assert block.q.core_0.grad is None
    assert block.o.core_0.grad is not None


def test_a_gradient_that_was_left_behind_does_not_come_back():
    block, x = Attention(), random_input()
    block.set_codes(True)
    query, key, value = (split(layer(x)) for layer in (block.q, block.k, block.v))
    with torch.no_grad():
        context = attend(query, key, value)
    assert not context.requires_grad
    block.o(context).sum().backward()
    assert block.q.core_0.grad is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant):
    block, x = Attention(), random_input()
    block.options = {"dropout_p": 0.2}
    expected = results(block, x, True)
    torch.manual_seed(1)
    y = checkpoint(block, x, use_reentrant=use_reentrant)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))
    torch.testing.assert_close([y, x.grad, *(parameter.grad for parameter in block.parameters())], expected)


def test_second_derivatives_and_a_retained_graph():
    block, x = Attention(), random_input()
    block.options = {"attn_mask": torch.randn(5, 5, dtype=torch.float64)}

    def penalty(in_codes):
        block.set_codes(in_codes)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = block(x)
            grads = torch.autograd.grad(y.square().sum(), [x, block.q.core_4], create_graph=True)
            again = torch.autograd.grad(y.square().sum(), [x, block.q.core_4], retain_graph=True)
        torch.testing.assert_close(grads, again)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), [x, block.q.core_4, block.v.bias])

    torch.testing.assert_close(penalty(True), penalty(False))


def test_a_dense_output_layer_takes_the_real_tensor(uses):
    block, x = Attention(), random_input()
    block.o = nn.Linear(HEADS * SIZE, 12, dtype=torch.float64)
    found = results(block, x, True)
    assert uses == ["_made"]
    torch.testing.assert_close(found, results(block, x, False))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_copies_attend_to_codes_too(copied, uses):
    block, x = Attention(), random_input()
    block.set_codes(True)
    twin = copied(block)
    torch.testing.assert_close(twin(x), block(x))
    assert uses == ["code", "code"]
