"""hf_comera/ops/low_rank.py: from two halves it computes what nn.Linear does with the matrix they multiply to."""

import pytest
import torch
from torch.nn import functional

from hf_comera.ops import dense_linear

INPUTS, OUTPUTS, RANK = 11, 10, 6


def problem(dtype=torch.float64):
    shapes = (2, 4, INPUTS), (RANK, INPUTS), (RANK, OUTPUTS), (OUTPUTS,)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("with_bias", [True, False])
def test_matches_a_dense_layer_in_values_and_gradients(with_bias):
    x, left, right, bias = problem()
    inputs = [x, left, right, bias] if with_bias else [x, left, right]
    y, expected = dense_linear(*inputs), functional.linear(x, (left.T @ right).T, bias if with_bias else None)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "all-in-dtype"])
def test_low_precision_error_is_like_that_of_plain_torch(dtype, autocast):
    torch.manual_seed(1)
    x, left, right, bias = problem(torch.float32)
    if not autocast:
        x, left, right, bias = (each.detach().to(dtype) for each in (x, left, right, bias))
    matrix = (left.double().T @ right.double()).T
    exact = functional.linear(x.double(), matrix, bias.double())
    plain = functional.linear(x.to(dtype), matrix.to(dtype), bias.to(dtype))
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        y = dense_linear(x, left, right, bias)
    assert y.dtype == dtype
    assert (y.double() - exact).norm() <= 2 * (plain.double() - exact).norm()
    if autocast:
        y.float().sum().backward()
        assert left.grad.dtype == right.grad.dtype == torch.float32
