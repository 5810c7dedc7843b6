"""hf_comera/ops/fp8_linear.py: products of rounded factors, what is kept for backward, and what is refused."""

import math
import re

import pytest
import torch
from torch.nn import functional

from hf_comera.ops.fp8 import store_by_tensor
from hf_comera.ops.fp8_linear import fp8_device_refusal, fp8_linear

E5M2 = torch.float8_e5m2
DTYPES = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 1e-2), "fp16": (torch.float16, 2e-3)}
SHAPES = {  # leading axes of x, in features, out features
    "square": ((2, 32), 64, 64),
    "odd tokens": ((3, 11), 48, 16),
    "one token": ((1,), 16, 80),
    "no leading axis": ((), 32, 48),
    "no tokens": ((0, 5), 32, 48),
}

all_dtypes = pytest.mark.parametrize(("dtype", "rounding"), DTYPES.values(), ids=DTYPES)
all_shapes = pytest.mark.parametrize(("leading", "in_features", "out_features"), SHAPES.values(), ids=SHAPES)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def rounded(tensor: torch.Tensor, format: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """What an FP8 product sees, in float64."""
    return store_by_tensor(tensor.detach(), format=format).decode().double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one, relative to the largest entry."""
    if not expected.any():
        return float(found.any())
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@all_shapes
@all_dtypes
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_result_and_gradients_are_products_of_rounded_factors(
    leading, in_features, out_features, dtype, rounding, has_bias
):
    x, weight = draw(*leading, in_features, dtype=dtype), draw(out_features, in_features, dtype=dtype)
    bias = draw(out_features, dtype=dtype) if has_bias else None
    y = fp8_linear(x, weight, bias)
    dy = torch.randn_like(y)
    y.backward(dy)

    factors = rounded(x), rounded(weight), rounded(dy, E5M2)
    x64, weight64, dy64 = (factor.reshape(-1, factor.shape[-1]) for factor in factors)
    expected = x64 @ weight64.T + (0 if bias is None else bias.detach().double())
    assert y.dtype == x.grad.dtype == weight.grad.dtype == dtype
    assert y.shape == (*leading, out_features)
    assert x.grad.shape == x.shape
    assert error(y.detach().reshape(-1, out_features), expected) <= rounding
    assert error(x.grad.reshape(-1, in_features), dy64 @ weight64) <= rounding
    assert error(weight.grad, dy64.T @ x64) <= rounding
    if bias is not None:
        assert error(bias.grad, dy.double().reshape(-1, out_features).sum(0)) <= rounding


def test_is_near_to_the_plain_layer():
    x, weight, bias = draw(256, 128), draw(64, 128), draw(64)
    plain = functional.linear(x, weight, bias).detach()
    assert (fp8_linear(x, weight, bias) - plain).norm() / plain.norm() < 0.05


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_gives_only_the_gradients_that_are_asked_for(frozen):
    tensors = {"x": draw(4, 32), "weight": draw(16, 32), "bias": draw(16)}
    tensors[frozen].requires_grad_(False)
    fp8_linear(**tensors).sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is None] == [frozen]


def test_takes_layouts_that_are_not_contiguous():
    x, weight = draw(32, 6), draw(32, 16)
    y = fp8_linear(x.T, weight.T)
    y.sum().backward()
    assert error(y.detach(), rounded(x.T) @ rounded(weight)) < 1e-5
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape


def kept_bytes(*layers: torch.Tensor, x: torch.Tensor) -> int:
    """Bytes of the storages that layers on the same input keep, weights left out."""
    weights = {weight.untyped_storage().data_ptr() for weight in layers}
    found = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [fp8_linear(x, weight) for weight in layers]
    assert len(outputs) == len(layers)
    return sum(size for pointer, size in found.items() if pointer not in weights)


def test_layers_that_share_an_input_keep_it_once_in_one_byte_an_entry():
    query, key, value = (draw(32, 64) for _ in range(3))
    assert kept_bytes(query, key, value, x=draw(8, 64) * 2) == 8 * 64 + 4  # codes and a scale


def test_frozen_layers_keep_nothing_but_weights():
    assert kept_bytes(draw(32, 64).detach(), x=draw(8, 64)) == 0


def change_in_place(x, buffer):
    with torch.no_grad():
        x.mul_(-1)


def change_unseen(x, buffer):
    buffer *= -1


def change_data(x, buffer):
    x.data.mul_(-1)


@pytest.mark.parametrize("change", [change_in_place, change_unseen, change_data])
def test_an_input_that_was_changed_is_rounded_anew(change):
    buffer = torch.randn(4, 32).numpy()
    x, weight = torch.from_numpy(buffer).requires_grad_(), draw(16, 32)
    before = fp8_linear(x, weight)
    change(x, buffer)
    assert torch.equal(fp8_linear(x, weight), -before)


def test_a_result_that_was_changed_in_place_is_rounded_anew():
    x, weight = draw(4, 32) * 2, draw(16, 32)
    before = fp8_linear(x, weight)
    with torch.no_grad():
        x.mul_(-1)
    assert torch.equal(fp8_linear(x, weight), -before)


@pytest.mark.parametrize("shape", [(4, 32), (2, 3, 32)], ids=str)
def test_the_result_may_be_changed_in_place(shape):
    x, weight = draw(*shape), draw(16, 32)
    y = fp8_linear(x, weight)
    (expected,) = torch.autograd.grad((2 * y).relu().sum(), x, retain_graph=True)
    y.mul_(2).relu_().sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("amount", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_noticed(amount):
    x, weight = draw(4, 32), draw(16, 32)
    dy = torch.randn(4, 16)
    dy[1, 3] = amount
    fp8_linear(x, weight).backward(dy)
    assert not x.grad[1].isfinite().all()
    assert not weight.grad[3].isfinite().all()
    assert x.grad[[0, 2, 3]].isfinite().all()
    assert weight.grad[:3].isfinite().all()


def test_autocast_decides_the_dtype_of_the_result_and_not_of_gradients():
    x, weight, bias = draw(4, 32), draw(16, 32), draw(16)
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_linear(x, weight, bias)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32


def test_works_where_tensors_have_no_version():
    with torch.inference_mode():
        x, weight = torch.randn(4, 32), torch.randn(16, 32)
        assert torch.equal(fp8_linear(x, weight), fp8_linear(x.clone(), weight))


def test_trains_on_what_was_evaluated_before():
    x, weight = draw(4, 32) * 2, draw(16, 32)
    with torch.inference_mode():
        before = fp8_linear(x, weight).clone()
    y = fp8_linear(x, weight)
    y.sum().backward()
    assert torch.equal(y, before)


def test_a_change_of_the_weight_before_backward_is_noticed():
    x, weight = draw(4, 32), draw(16, 32)
    y = fp8_linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_raise():
    x, weight = draw(4, 32), draw(16, 32)
    (grad,) = torch.autograd.grad(fp8_linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "dtype", "message"),
    [
        ((4, 32), (15, 32), torch.float32, "weight has shape (15, 32) and x (4, 32); FP8 products need"),
        ((4, 24), (16, 24), torch.float32, "multiples of 16, for example (3072, 768)"),
        ((4, 16), (16, 32), torch.float32, "weight has shape (16, 32) and x (4, 16)"),
        ((4, 32), (16, 32), torch.float64, "x has dtype torch.float64; FP8 products take torch.bfloat16"),
    ],
    ids=["outputs", "inputs", "mismatch", "dtype"],
)
def test_what_does_not_fit_is_refused(x_shape, weight_shape, dtype, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fp8_linear(torch.randn(x_shape, dtype=dtype), torch.randn(weight_shape, dtype=dtype))


@pytest.mark.parametrize(
    ("capability", "reason"), [((8, 9), None), ((9, 0), None), ((8, 0), "has compute capability 8.0")]
)
def test_which_devices_can(monkeypatch, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    found = fp8_device_refusal(torch.device("cuda"))
    assert found is None if reason is None else reason in found
    assert fp8_device_refusal(torch.device("cpu")) is None
    assert "type 'meta'" in fp8_device_refusal(torch.device("meta"))
