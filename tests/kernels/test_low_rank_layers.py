"""hf_comera/ops/low_rank.py: with kernels it computes what it computes without."""

import pytest
import torch

from hf_comera.ops import use_kernels
from hf_comera.ops.low_rank import low_rank_linear

LAUNCHES = ["low_rank_linear", "low_rank_linear_backward"]


def problem(device, rank=8, dtype=torch.float32):
    shapes = ((2, 3, 6), (rank, 6), (rank, 10), (10,))
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def value_and_gradients(tensors):
    y = low_rank_linear(*tensors)
    return [y, *torch.autograd.grad(y.float().square().sum(), tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_torch(dtype, served, calls):
    tensors = problem(served, dtype=dtype)
    found = value_and_gradients(tensors)
    assert [name for name, _ in calls] == LAUNCHES
    use_kernels(False)
    tolerance = {"rtol": 5e-2, "atol": 5e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, value_and_gradients(tensors), **tolerance)
    assert len(calls) == len(LAUNCHES)


@pytest.mark.parametrize(("rank", "dtype"), [(200, torch.float32), (12, torch.float32), (8, torch.float64)], ids=str)
def test_what_has_no_kernel_runs_in_torch(rank, dtype, served, calls):
    tensors = problem(served, rank, dtype)
    found = value_and_gradients(tensors)
    assert not calls
    use_kernels(False)
    torch.testing.assert_close(found, value_and_gradients(tensors), rtol=1e-4, atol=1e-4)


def test_second_derivatives_are_those_of_torch(served, calls):
    tensors, results = problem(served), []
    for wanted in (True, False):
        use_kernels(wanted)
        y = low_rank_linear(*tensors)
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        results.append(torch.autograd.grad(sum(each.square().sum() for each in first), tensors))
    assert [name for name, _ in calls] == LAUNCHES  # not for the graph of the first derivatives
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)
