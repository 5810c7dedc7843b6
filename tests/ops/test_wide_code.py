"""hf_comera/ops/wide_code.py: equals the hidden layer written out, saves codes, and is never wider than a chunk."""

import pytest
import torch
from torch.nn import functional

from hf_comera.ops import wide_code as module
from hf_comera.ops.wide_code import wide_code
from hf_comera.ops.wide_input import WideForm, WideInput

POINTWISE = {
    "gelu": (1, lambda wides, masks: functional.gelu(wides[0])),
    "gated": (2, lambda wides, masks: functional.silu(wides[0]) * wides[1]),
    "dropout": (1, lambda wides, masks: functional.relu(wides[0]) * masks[0] * 1.25),
}
each_pointwise = pytest.mark.parametrize(("num_inputs", "pointwise"), POINTWISE.values(), ids=POINTWISE)


def problem(num_inputs, rows=7, hidden=12, rank=3, dtype=torch.float64, bias=True):
    def random(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    inputs = [
        WideInput(random(rows, 4), random(4, hidden), random(hidden) if bias else None) for _ in range(num_inputs)
    ]
    return inputs, [torch.rand(rows, hidden) < 0.8], random(rank, hidden)


def written_out(inputs, pointwise, masks, left):
    wides = [functional.linear(part.code, part.right.T, part.bias) for part in inputs]
    return functional.linear(pointwise(wides, masks), left)


def leaves(inputs, left):
    return [left, *(tensor for part in inputs for tensor in part if tensor is not None)]


@each_pointwise
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("chunk_entries", [1, 24, 30, 1000])
def test_equals_the_hidden_layer_written_out(num_inputs, pointwise, bias, rows, chunk_entries, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", chunk_entries)
    inputs, masks, left = problem(num_inputs, rows, bias=bias)
    ours, expected = wide_code(inputs, pointwise, masks, left), written_out(inputs, pointwise, masks, left)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    tensors = leaves(inputs, left)
    torch.testing.assert_close(torch.autograd.grad(ours, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@each_pointwise
def test_gradcheck_and_second_derivatives(num_inputs, pointwise, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", 24)
    inputs, masks, left = problem(num_inputs, rows=3, hidden=5, rank=2)

    def op(left, *tensors):
        parts = [WideInput(*tensors[3 * index : 3 * index + 3]) for index in range(num_inputs)]
        return wide_code(parts, pointwise, masks, left)

    if pointwise is not POINTWISE["dropout"][1]:  # relu has no second derivative to check
        assert torch.autograd.gradgradcheck(op, leaves(inputs, left))
    assert torch.autograd.gradcheck(op, leaves(inputs, left))


@each_pointwise
def test_nothing_wide_is_saved_or_made(num_inputs, pointwise, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", 8 * 64)
    inputs, _, left = problem(num_inputs, rows=400, hidden=64, dtype=torch.float32)
    masks = [torch.rand(400, 64) < 0.8]
    saved = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype.is_floating_point:
                self.largest = max(self.largest, result.untyped_storage().nbytes() // 4)
            return result

    with Largest() as mode, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        wide_code(inputs, pointwise, masks, left).sum().backward()
    assert mode.largest < 400 * 64 / 4
    assert not [tensor.shape for tensor in saved if tensor.shape == (400, 64) and tensor.dtype != torch.bool]


def test_16_bit_gradients_are_as_exact_as_those_of_whole_products():
    inputs, masks, left = problem(1, rows=4096, hidden=32)
    pointwise = POINTWISE["gelu"][1]
    exact = torch.autograd.grad(written_out(inputs, pointwise, masks, left).sum(), leaves(inputs, left))
    low = [WideInput(*(tensor.detach().bfloat16().requires_grad_() for tensor in part)) for part in inputs]
    low_left = left.detach().bfloat16().requires_grad_()
    errors = {}
    for name, op in (("whole", written_out), ("chunks", wide_code)):
        grads = torch.autograd.grad(op(low, pointwise, masks, low_left).float().sum(), leaves(low, low_left))
        errors[name] = [(a.double() - b).norm().item() for a, b in zip(grads, exact, strict=True)]
    for chunks, whole in zip(errors["chunks"], errors["whole"], strict=True):
        assert chunks <= 2 * whole + 1e-12


FORMS = {
    "gelu": WideForm("gelu", (0,)),
    "gate-first": WideForm("gelu_tanh", (1, 0), 1.25),
    "relu": WideForm("relu", (0,), 2.0),
    "silu": WideForm("silu", (0, 1)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_operators_are_what_autograd_makes_of_a_form(form, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", 24)
    inputs, masks, left = problem(len(form.order))
    masks = masks if form.scale else []
    results = []
    for pointwise in (form, lambda wides, masks: form(wides, masks)):
        code = wide_code(inputs, pointwise, masks, left)
        results.append([code, *torch.autograd.grad(code.square().sum(), leaves(inputs, left))])
    torch.testing.assert_close(*results)


def test_opcheck():
    inputs, masks, left = problem(2)
    columns = [[tensor.detach() for tensor in column] for column in zip(*inputs, strict=True)]
    operands = (*columns, masks, left.detach())
    form = {"activation": "gelu", "scale": 1.25}
    for operator, arguments in (
        (module._wide_code, operands),
        (module._wide_code_backward, (torch.randn(7, 3, dtype=torch.float64), *operands)),
    ):
        torch.library.opcheck(operator, arguments, form, test_utils=("test_schema", "test_faketensor"))
