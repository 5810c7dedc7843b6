"""hf_comera/ops/low_rank_linear.py: one operator gives what two products give, by torch and by the kernels."""

import sys

import pytest
import torch
from torch.nn import functional

from hf_comera.ops import kernel_switch, use_kernels
from hf_comera.ops.low_rank_linear import _low_rank_linear, _low_rank_linear_backward, low_rank_linear

module = sys.modules["hf_comera.ops.low_rank_linear"]  # as an attribute of its package it is the function


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
    assert torch.autograd.gradcheck(_low_rank_linear, arguments)  # y and the code
    torch.library.opcheck(_low_rank_linear, arguments)
    torch.library.opcheck(_low_rank_linear, (x, left, right, None), test_utils=("test_schema", "test_faketensor"))
    y, code = _low_rank_linear(*arguments)
    inputs = [tensor.detach() for tensor in (torch.randn_like(y), torch.randn_like(code), x, code, left, right)]
    torch.library.opcheck(_low_rank_linear_backward, tuple(inputs), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_registered_for_gpus_computes_the_same(dtype, monkeypatch):
    """The kernels, emulated on the CPU, through the functions that a CUDA tensor would reach."""
    tensors = [tensor.detach() for tensor in problem((5,), dtype=dtype)]
    forward, backward = (op._backend_fns["cuda"] for op in (_low_rank_linear, _low_rank_linear_backward))
    monkeypatch.setattr(kernel_switch, "_wanted", True)
    y, code = forward(*tensors)
    expected_y, expected_code = _low_rank_linear._init_fn(*tensors)
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close((y, code), (expected_y, expected_code), **tolerance)
    x, left, right, _ = tensors
    arguments = (torch.randn_like(y), None, x, code, left, right)
    expected = _low_rank_linear_backward._init_fn(*arguments)
    torch.testing.assert_close(backward(*arguments), expected, **tolerance)


def test_the_switch(monkeypatch):
    tensors = [tensor.detach() for tensor in problem((5,), dtype=torch.float32)]
    called = []
    monkeypatch.setattr(module.low_rank_kernels, "low_rank_linear", lambda *args: called.append(1) or args[:2])
    forward = _low_rank_linear._backend_fns["cuda"]
    try:
        for wanted, expected in ((False, 0), (True, 1)):
            use_kernels(wanted)
            assert kernel_switch.kernels_are_wanted() is wanted
            forward(*tensors)
            assert len(called) == expected
    finally:
        use_kernels(False)


def test_shapes_without_a_kernel_run_in_torch(monkeypatch):
    monkeypatch.setattr(kernel_switch, "_wanted", True)
    tensors = [tensor.detach() for tensor in problem((5,), rank=200, dtype=torch.float32)]
    y, _ = _low_rank_linear._backend_fns["cuda"](*tensors)
    torch.testing.assert_close(y, reference(*tensors))
