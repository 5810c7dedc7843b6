"""hf_comera/modules/wide_hidden.py: feed-forward blocks are computed without their hidden layer, and anything else
that is done with the stand-in is done with the real tensor, gradients included."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from hf_comera.modules import TTLinear, wide_hidden
from hf_comera.modules.wide_hidden import WideHidden
from hf_comera.ops import wide_code

ACTIVATIONS = ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "tanh"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(TTLinear, "_other_path", lambda self, x: None)  # so small a layer would be dense
    monkeypatch.setattr(wide_hidden, "CHUNK_ENTRIES", 1)
    monkeypatch.setattr(wide_code, "CHUNK_ENTRIES", 60)


@pytest.fixture
def uses(monkeypatch):
    """How stand-ins were used: as a code, or made real."""
    seen = []
    for name in ("code", "real"):
        original = getattr(WideHidden, name)
        monkeypatch.setattr(
            WideHidden,
            name,
            lambda self, *args, name=name, original=original: seen.append(name) or original(self, *args),
        )
    return seen


class Block(nn.Module):
    """A feed-forward block, plain or gated."""

    def __init__(self, act=functional.gelu, gated=False, dropout=0.0, rank_activation=None, dtype=torch.float64):
        super().__init__()
        settings = {"ranks": 5, "rank_activation": rank_activation, "dtype": dtype}
        self.up = TTLinear(8, 24, **settings)
        self.gate = TTLinear(8, 24, bias=False, **settings) if gated else None
        self.down = TTLinear(24, 8, **settings)
        self.act, self.dropout = act, nn.Dropout(dropout)
        self.set_wide(True)

    def set_wide(self, is_wide):
        self.up.is_wide = is_wide
        if self.gate is not None:
            self.gate.is_wide = is_wide

    def forward(self, x):
        hidden = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden))


def random_input(rows=9, dtype=torch.float64):
    return torch.randn(2, rows, 8, dtype=dtype, requires_grad=True)


def results(block, x, is_wide, call=None):
    """Output and all gradients."""
    block.set_wide(is_wide)
    torch.manual_seed(1)
    y = (call or block)(x)
    grad = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    return [y, *torch.autograd.grad(y, [x, *block.parameters()], grad)]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_equals_the_written_out_block_for_activations_of_transformers(name, gated, uses):
    block, x = Block(ACT2FN[name], gated), random_input()
    ours = results(block, x, True)
    assert uses == ["code"], "the hidden layer was never made"
    torch.testing.assert_close(ours, results(block, x, False))


@pytest.mark.parametrize("rank_activation", ["silu", "gelu"])
def test_rank_activations(rank_activation, uses):
    block, x = Block(rank_activation=rank_activation), random_input()
    torch.testing.assert_close(results(block, x, True), results(block, x, False))
    assert uses == ["code"]


def test_dropout_drops_the_share_it_should_and_forward_and_backward_agree(uses):
    block, x = Block(nn.Identity(), dropout=0.25), torch.randn(2, 500, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    hidden = block.dropout(block.up(x))
    y = block.down(hidden)
    assert uses == ["code"]
    real = hidden.real()
    assert (real == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(y, block.down(real))
    grad = torch.randn_like(y)
    tensors = [x, *block.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y, tensors, grad, retain_graph=True),
        torch.autograd.grad(block.down(real), tensors, grad),
    )
    assert block.eval().dropout(block.up(x))._hidden.masks == {}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden * 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class StraightThrough(torch.autograd.Function):
    """Its backward is not the derivative of what it computes."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clamp(-0.01, 0.01)

    @staticmethod
    def backward(ctx, grad):
        return grad


def gate_without_gradient(hidden):
    with torch.no_grad():
        gate = torch.sigmoid(hidden)
    return hidden * gate


def clamped_without_gradient(hidden):
    with torch.no_grad():
        hidden.clamp_(-0.1, 0.1)
    return hidden


def hooked(hidden):
    hidden.register_hook(lambda grad: 3 * grad)
    return hidden


def kept(hidden):
    with torch.no_grad():
        kept.norm = hidden.norm()
    return hidden


USES = {
    "reshape": lambda hidden: hidden.view(-1, 24).view(hidden.shape),
    "index": lambda hidden: hidden[:, :] * 1,
    "a tensor": lambda hidden: hidden * torch.full((24,), 2.0, dtype=torch.float64),
    "in place": lambda hidden: functional.relu(hidden, inplace=True),
    "in place operator": lambda hidden: hidden.mul_(2),
    "two at once": lambda hidden: torch.cat([hidden, hidden])[: hidden.shape[0]],
    "sum": lambda hidden: hidden / hidden.sum(),
    "softmax": lambda hidden: hidden.softmax(-1),
    "custom function": Doubled.apply,
    "straight-through function": StraightThrough.apply,
    "a gate without gradient": gate_without_gradient,
    "in place without gradient": clamped_without_gradient,
    "dropout without gradient": torch.no_grad()(lambda hidden: functional.dropout(hidden, 0.0)),
    "an activation that is not known": functional.selu,
    "hook": hooked,
    "looked at without gradient": kept,
    "detached": lambda hidden: hidden.detach() * hidden,
    "all of it dropped": lambda hidden: functional.dropout(hidden, 1.0),
    "scalar tensor": lambda hidden: hidden * torch.tensor(2.0, dtype=torch.float64),
    "power": lambda hidden: 2.0**hidden,
    "cast": lambda hidden: hidden.float().double(),
    "checkpointed": lambda hidden: checkpoint(functional.silu, hidden, use_reentrant=False),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whatever_else_is_done_is_done_with_the_real_tensor(use):
    block, x = Block(use), random_input()
    torch.testing.assert_close(results(block, x, True), results(block, x, False), rtol=1e-6, atol=1e-6)


def test_questions_are_answered_without_making_it(uses):
    block, x = Block(), random_input()
    hidden = block.up(x)
    assert isinstance(hidden, WideHidden)
    assert (hidden.shape, hidden.dtype, hidden.device, hidden.dim()) == ((2, 9, 24), torch.float64, x.device, 3)
    assert (hidden.size(-1), hidden.numel(), hidden.requires_grad) == (24, 432, True)
    assert "WideHidden" in repr(hidden)
    assert uses == []


def test_a_layer_with_a_hook_gives_a_tensor():
    block, seen = Block(), []
    block.up.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    block(random_input())
    assert seen == [torch.Tensor]


def test_small_hidden_layers_are_tensors(monkeypatch):
    monkeypatch.setattr(wide_hidden, "CHUNK_ENTRIES", 1000)
    assert type(Block().up(random_input())) is torch.Tensor


def test_a_dense_layer_behind_takes_the_real_one():
    block, x = Block(), random_input()
    block.down = nn.Linear(24, 8, dtype=torch.float64)
    torch.testing.assert_close(results(block, x, True), results(block, x, False))


def test_frozen_parts():
    block, x = Block(), random_input()
    block.up.requires_grad_(False)
    for is_wide in (True, False):
        block.set_wide(is_wide)
        grads = torch.autograd.grad(block(x).sum(), [x, *block.down.parameters()])
        expected = grads if is_wide else expected  # noqa: F821
    torch.testing.assert_close(grads, expected)
    with torch.no_grad():
        block.set_wide(True)
        ours = block(x)
        block.set_wide(False)
        torch.testing.assert_close(ours, block(x))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_blocks(use_reentrant):
    block, x = Block(ACT2FN["silu"], gated=True, dropout=0.3), random_input()
    for parameter in block.parameters():
        parameter.grad = None
    plain = results(block, x, True)
    again = checkpointed(block, x, use_reentrant)
    torch.testing.assert_close(again, plain)


def checkpointed(block, x, use_reentrant):
    torch.manual_seed(1)
    x.grad = None
    y = checkpoint(block, x, use_reentrant=use_reentrant)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))
    return [y, x.grad, *(parameter.grad for parameter in block.parameters())]


def test_second_derivatives():
    block, x = Block(functional.silu, gated=True), random_input(2)

    def penalty():
        return sum(
            grad.square().sum()
            for grad in torch.autograd.grad(block(x).square().sum(), [x, block.up.core_0], create_graph=True)
        )

    found = {}
    for is_wide in (True, False):
        block.set_wide(is_wide)
        found[is_wide] = torch.autograd.grad(penalty(), [x, block.up.core_0, block.down.core_1])
    torch.testing.assert_close(found[True], found[False])


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu"])
def test_autocast_is_that_of_the_written_out_block(name):
    block, x = Block(ACT2FN[name], gated=True, dtype=torch.float32), random_input(dtype=torch.float32)
    exact = results(block, x, False)

    def in_16_bits(x):
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    ours, plain = results(block, x, True, in_16_bits), results(block, x, False, in_16_bits)
    assert ours[0].dtype == plain[0].dtype == torch.bfloat16
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-6


def test_compiled_and_transformed_blocks_never_see_a_stand_in():
    block, x = Block(), random_input()
    expected = results(block, x, False)[0]
    block.set_wide(True)
    torch.testing.assert_close(torch.compile(block, backend="aot_eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.vmap(block)(x), expected)


def test_the_saved_memory_is_that_of_codes(uses):
    block, x = Block(ACT2FN["gelu_new"], dtype=torch.float32), random_input(200, torch.float32)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        block(x)
    assert not [t.shape for t in saved.values() if t.numel() >= 400 * 24]
    assert uses == ["code"]
    assert math.isfinite(sum(t.float().sum().item() for t in saved.values()))


def test_a_hidden_layer_made_without_gradient_trains_nothing_before_it():
    block, x = Block(), random_input()
    block(x).sum().backward()
    block.zero_grad()
    with torch.no_grad():
        hidden = block.up(x)
    block.down(functional.gelu(hidden)).sum().backward()
    assert all(parameter.grad is None for parameter in block.up.parameters())
    assert block.down.core_0.grad is not None


@pytest.mark.parametrize("behind", [nn.Identity(), Doubled.apply], ids=["plain", "custom-function"])
def test_one_layer_that_feeds_both_inputs_of_a_gate(behind):
    block, x = Block(), random_input(3)
    block.forward = lambda x: block.down(behind(functional.silu(block.up(x)) * block.up(x / 2)))

    def penalty(y):
        grads = torch.autograd.grad(y.square().sum(), [x, block.up.core_4], create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    found = {}
    for is_wide in (True, False):
        first = results(block, x, is_wide)
        found[is_wide] = [*first, *torch.autograd.grad(penalty(block(x)), [x, block.up.core_4, block.up.bias])]
    torch.testing.assert_close(found[True], found[False])


def test_autocast_saves_as_little(uses):
    block, x = Block(dtype=torch.float32), random_input(200, torch.float32)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        block(x)
    assert uses == ["code"]
    assert not [shape for shape in saved if shape.numel() >= 400 * 24]


def test_masks_are_freed_with_the_graph():
    block, x = Block(dropout=0.5), random_input(50)
    masks = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype == torch.bool and masks.append(weakref.ref(t))) or t, lambda t: t):  # fmt: skip  # noqa: E501
        loss = block(x).sum()
    loss.backward()
    assert masks
    assert not any(mask() is not None for mask in masks)
    assert loss.grad_fn is not None
