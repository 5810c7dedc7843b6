"""hf_comera/memory/session.py: tensors that a model writes to; an error where plain autograd has one, or better."""

import pytest
import torch
from torch.nn import functional

from hf_comera.memory import set_activation_policy
from tests.memory.policy_runs import EXACT, Of, assert_same, run, scalar_of
from tests.memory.test_session import doubled, every_exact_policy


def added_to_a_copy(module, x):
    y = module.first(x)
    z = y.clone()
    z += x
    z *= x
    return z.relu_() * y


def input_of_a_saved_output(module, x):
    y = doubled(module, x)
    z = y.exp()
    y += 1
    return z * z * y * y


def slice_assigned(module, x):
    y = doubled(module, x)
    y[0] = x[1]
    y[:, 1:3] *= 2
    return y.exp() * y


def parameter_written_to(module, x):
    with torch.no_grad():
        module.second.bias.fill_(0.5)
    y = x.detach() * 2 + module.second.bias
    with torch.no_grad():
        module.second.bias.fill_(2.0)
    return y * y * module.first(x)


def read_from_data(module, x):
    y = module.first(x)
    y.data.clamp_(-0.1, 0.1)
    return y.exp() * y


def written_through_data(module, x):
    squares, y = x * x, x * 2
    y.data.add_(1)
    return squares + y * y


def grown(module, x):
    total = torch.zeros_like(x)
    for layer in (module.first, module.second):
        total += functional.gelu(layer(x))
    return total.exp() * total


RIGHT = {
    function.__name__: function
    for function in (
        added_to_a_copy,
        input_of_a_saved_output,
        slice_assigned,
        parameter_written_to,
        read_from_data,
        written_through_data,
        grown,
    )
}


@every_exact_policy
@pytest.mark.parametrize("use", RIGHT.values(), ids=RIGHT)
def test_gradients_are_right_where_those_of_plain_autograd_are(use, policy):
    module, x = Of(use), torch.randn(4, 6, 8, requires_grad=True)
    plain = run(module, {"x": x}, None)
    assert_same(run(module, {"x": x}, policy), plain)


def product_of_a_written_tensor(module, x):
    y = doubled(module, x)
    z = y * y
    y += 1
    return z


def weight_written_to(module, x):
    y = module.norm(x)
    with torch.no_grad():
        module.norm.weight.mul_(2)
    return y * y


WRONG = {function.__name__: function for function in (product_of_a_written_tensor, weight_written_to)}


@pytest.mark.parametrize("policy", [None, *EXACT.values()], ids=["plain", *EXACT])
@pytest.mark.parametrize("use", WRONG.values(), ids=WRONG)
def test_what_was_kept_may_not_be_written_to(use, policy):
    with pytest.raises(RuntimeError, match="changed in place: it is at version"):
        run(Of(use), {"x": torch.randn(4, 6, 8, requires_grad=True)}, policy)


@every_exact_policy
def test_what_is_rebuilt_may_be_written_to(policy):
    """Plain autograd refuses this; here the activation is made again as it was."""

    def written_after_a_product(module, x):
        y = functional.gelu(module.first(x))
        z = module.second(y.clone() if copies else y)
        y += 1
        return z

    module, x = Of(written_after_a_product), torch.randn(4, 6, 8, requires_grad=True)
    copies = True
    expected = run(module, {"x": x}, None)
    copies = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scalar_of(module(x)).backward()
    assert_same(run(module, {"x": x}, policy), expected)


@every_exact_policy
def test_a_parameter_changed_between_forward_and_backward(policy):
    """Plain autograd refuses it where it keeps the parameter; a policy also where it rebuilds a tensor from it."""
    module = Of(lambda module, x: (torch.ones(4, 6, 8) * module.first.bias).square())
    set_activation_policy(module, policy)
    loss = scalar_of(module(torch.randn(4, 6, 8)))
    with torch.no_grad():
        module.first.bias.add_(1)
    with pytest.raises(RuntimeError, match="Change a copy of it"):
        loss.backward()
