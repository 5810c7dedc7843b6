"""hf_comera/modules/unwritten.py: stand-ins keep their gradients past functions, checkpoints, hooks and scripts."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_comera.modules.unwritten_heads import UnwrittenHeads
from tests.modules import feed_forward_blocks
from tests.modules.attention_blocks import Attention, attend, random_input, results, split
from tests.modules.feed_forward_blocks import Block

pytestmark = pytest.mark.usefixtures("small_chunks")


class Inside(torch.autograd.Function):
    """Returns what ``block`` makes of x, with the gradient of another pass."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.block(x).backward(grad)
        return x.grad, None


BOUNDARIES = {
    "query checkpointed": lambda block, x: [checkpoint(block.q, x, use_reentrant=True), block.k(x), block.v(x)],
    "all checkpointed": lambda block, x: [
        checkpoint(layer, x, use_reentrant=True) for layer in (block.q, block.k, block.v)
    ],
    "out of a function": lambda block, x: [Inside.apply(x, layer) for layer in (block.q, block.k, block.v)],
    "without reentry": lambda block, x: [
        checkpoint(layer, x, use_reentrant=False) for layer in (block.q, block.k, block.v)
    ],
}


@pytest.mark.usefixtures("draws_of_torch")
@pytest.mark.parametrize("behind", ["plain", "context checkpointed", "output checkpointed"])
@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES)
def test_stand_ins_that_cross_boundaries_keep_their_gradients(boundary, behind):
    block = Attention()
    block.options = {"dropout_p": 0.3}

    def forward(x):
        wides = [split(wide) for wide in boundary(block, x)]
        attention = lambda *wides: attend(*wides, **block.options)  # noqa: E731
        context = checkpoint(attention, *wides, use_reentrant=True) if "context" in behind else attention(*wides)
        return checkpoint(block.o, context, use_reentrant=True) if "output" in behind else block.o(context)

    def backward(in_codes):
        block.set_codes(in_codes)
        block.zero_grad()
        x = torch.linspace(-1, 1, 120, dtype=torch.float64).view(2, 5, 12).requires_grad_()
        torch.manual_seed(1)
        y = forward(x)
        y.square().sum().backward()
        return [y, x.grad, *(parameter.grad for parameter in block.parameters())]

    torch.testing.assert_close(backward(True), backward(False))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_hidden_layer_that_crosses_a_boundary_keeps_its_gradients(use_reentrant):
    block, x = Block(), feed_forward_blocks.random_input()
    expected = feed_forward_blocks.results(block, x, False)
    block.set_wide(True)
    y = block.down(block.act(checkpoint(block.up, x, use_reentrant=use_reentrant)))
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))
    torch.testing.assert_close([y, x.grad, *(parameter.grad for parameter in block.parameters())], expected)


@pytest.mark.parametrize("draws", ["draws_of_torch", "its own"])
def test_all_who_read_what_attention_with_dropout_has_made_read_the_same(draws, request):
    if draws == "draws_of_torch":
        request.getfixturevalue(draws)
    block, seen = Attention(), []
    block.options = {"dropout_p": 0.5}
    block.o.register_forward_hook(lambda module, args, output: seen.append((args[0] * 1, output)))
    x = random_input()
    found = results(block, x, True)
    torch.testing.assert_close(nn.functional.linear(seen[0][0], block.o.dense(), block.o.bias), seen[0][1])
    if draws == "draws_of_torch":
        torch.testing.assert_close(found, results(block, x, False))


@pytest.mark.usefixtures("draws_of_torch")
@pytest.mark.parametrize("part", ["q", "o"])
def test_full_backward_hooks(part):
    block, x = Attention(), random_input()
    block.options = {"dropout_p": 0.3}
    seen = []
    getattr(block, part).register_full_backward_hook(lambda module, grads, outputs: seen.append(outputs[0]))
    torch.testing.assert_close(results(block, x, True), results(block, x, False))
    torch.testing.assert_close(*seen)


def test_scripted_functions():
    twice_and_once = torch.jit.script(doubled)
    block, x = Attention(use=lambda wide: twice_and_once(wide) + wide), random_input()
    torch.testing.assert_close(results(block, x, True), results(block, x, False))


def doubled(x: torch.Tensor):
    return x * 2.0


def test_what_tensors_refuse_is_refused():
    block, x = Attention(), random_input()
    block.set_codes(True)
    query = split(block.q(x))
    assert isinstance(query, UnwrittenHeads)
    with pytest.raises(IndexError):
        query.transpose(1, 6)
    with pytest.raises(RuntimeError):
        block.q(x).view(7, 7)
    assert block.q(x).view(torch.int64).dtype == torch.int64


def test_forward_mode_derivatives():
    block, x = Attention(), random_input().detach()
    found = []
    for in_codes in (True, False):
        block.set_codes(in_codes)
        with (
            torch.autograd.forward_ad.dual_level(),
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            found.append(torch.autograd.forward_ad.unpack_dual(block(dual)).tangent)
    torch.testing.assert_close(*found)
