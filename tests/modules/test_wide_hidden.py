"""hf_comera/modules/wide_hidden.py: feed-forward blocks are computed without their hidden layer."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from hf_comera.modules import wide_hidden
from tests.modules.feed_forward_blocks import Block, random_input, results

pytestmark = pytest.mark.usefixtures("small_chunks")


ACTIVATIONS = ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "tanh"]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_equals_the_written_out_block_for_activations_of_transformers(name, gated, uses):
    block, x = Block(ACT2FN[name], gated), random_input()
    ours = results(block, x, True)
    assert uses == ["code"], "the hidden layer was never made"
    torch.testing.assert_close(ours, results(block, x, False))


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


def test_small_hidden_layers_are_tensors(monkeypatch):
    monkeypatch.setattr(wide_hidden, "WORTH_CHUNKS", 2000)
    assert type(Block().up(random_input())) is torch.Tensor


def test_off_the_cpu_it_is_made_where_no_kernel_takes_it(uses):
    block, x = Block(), random_input()
    hidden = block.act(block.up(x))
    hidden._hidden.device = torch.device("cuda")  # as far as anybody asks
    found = block.down(hidden)
    assert uses == ["real"]
    torch.testing.assert_close(found, results(block, x, False)[0])


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
