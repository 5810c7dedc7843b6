"""hf_comera/ops/low_rank.py: one operator gives what two products give, by torch and by the kernels."""

import pytest
import torch
from torch.nn import functional

from hf_comera.ops.low_rank import _low_rank_linear, _low_rank_linear_backward, low_rank_linear


def problem(lead=(2, 3), rank=8, dtype=torch.float64):
    def random(*shape):
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    return random(*lead, 6), random(rank, 6), random(rank, 10), random(10)


def reference(x, left, right, bias):
    return functional.linear(functional.linear(x, left), right.T, bias)


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3)], ids=str)
def test_equals_two_linear_layers(lead):
    x, left, right, bias = problem(lead)
    for some_bias in (bias, None):
        tensors = [x, left, right] if some_bias is None else [x, left, right, bias]
        ours = low_rank_linear(x, left, right, some_bias)
        expected = reference(x, left, right, some_bias)
        torch.testing.assert_close(ours, expected)
        grad = torch.randn_like(ours)
        torch.testing.assert_close(
            torch.autograd.grad(ours, tensors, grad), torch.autograd.grad(expected, tensors, grad)
        )


def test_gradcheck_and_opcheck():
    x, left, right, bias = problem()
    arguments = (x, left, right, bias)
    assert torch.autograd.gradcheck(_low_rank_linear, arguments)  # y and the latent
    torch.library.opcheck(_low_rank_linear, arguments)
    torch.library.opcheck(_low_rank_linear, (x, left, right, None), test_utils=("test_schema", "test_faketensor"))
    y, latent = _low_rank_linear(*arguments)
    inputs = [tensor.detach() for tensor in (torch.randn_like(y), torch.randn_like(latent), x, latent, left, right)]
    torch.library.opcheck(
        _low_rank_linear_backward,
        tuple(inputs),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("lead", [(0,), (2, 3)], ids=str)
def test_the_operator_gives_what_the_products_give(lead):
    arguments = tensors = problem(lead)
    ours, expected = _low_rank_linear(*arguments)[0], low_rank_linear(*arguments)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours).requires_grad_()
    first = [torch.autograd.grad(y, tensors, grad, create_graph=True) for y in (ours, expected)]
    torch.testing.assert_close(*first)
    loss, twin = (sum(each.square().sum() for each in grads) for grads in first)
    torch.testing.assert_close(
        torch.autograd.grad(loss, [*tensors[:3], grad]), torch.autograd.grad(twin, [*tensors[:3], grad])
    )


def test_without_kernels_there_is_no_operator():
    """Two products, which compilers and function transforms see through."""
    x, left, right, bias = problem()
    names = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Names():
        low_rank_linear(x, left, right, bias)
    assert not [name for name in names if "comera" in name]
    single = lambda row: low_rank_linear(row, left, right, bias)  # noqa: E731
    torch.testing.assert_close(torch.vmap(single)(x), low_rank_linear(x, left, right, bias))
    torch.testing.assert_close(torch.func.jacrev(single)(x[0, 0]), (left.T @ right).T)


def test_under_autocast_the_input_is_cast():
    x, left, right, bias = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = low_rank_linear(x, left, right, bias)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), reference(x, left, right, bias), rtol=5e-2, atol=1e-1)
