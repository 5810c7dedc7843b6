"""hf_comera/modules/wide_hidden.py: whatever else is done with the stand-in is done with the real tensor."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_comera.modules.wide_hidden import WideHidden
from tests.modules.custom_functions import Doubled
from tests.modules.feed_forward_blocks import Block, random_input, results

pytestmark = pytest.mark.usefixtures("small_chunks")


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
    "checkpointed and made real there": lambda hidden: checkpoint(torch.sin, hidden, use_reentrant=False),
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


def test_a_dense_layer_behind_takes_the_real_one():
    block, x = Block(), random_input()
    block.down = nn.Linear(24, 8, dtype=torch.float64)
    torch.testing.assert_close(results(block, x, True), results(block, x, False))


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
