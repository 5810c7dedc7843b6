"""hf_comera/ops/path_linear.py: layers along any path compute what nn.Linear does with the dense matrix."""

import pytest
import torch
from torch.nn import functional

from hf_comera.ops import dense_linear, path_linear
from hf_comera.tt.contraction import build_parts
from hf_comera.tt.cores import core_shapes, draw_cores
from hf_comera.tt.machine import CPU_THREAD
from hf_comera.tt.path import candidate_paths, plan_path

IN_FACTORS, OUT_FACTORS, RANKS, INPUTS, OUTPUTS = (4, 3), (3, 4), (4, 6, 4), 11, 10


def all_paths():
    settings = {"training": True, "halves_cached": False, "machine": CPU_THREAD}
    sizes = {"in_features": INPUTS, "out_features": OUTPUTS}
    return candidate_paths(plan_path(IN_FACTORS, OUT_FACTORS, RANKS, 8, **settings, **sizes).problem)


every_path = pytest.mark.parametrize("path", all_paths(), ids=lambda path: path.label)


def problem(dtype=torch.float64):
    cores = [torch.empty(shape, dtype=dtype) for shape in core_shapes((*IN_FACTORS, *OUT_FACTORS), RANKS)]
    draw_cores(cores, 0.3)
    cores = [core.requires_grad_() for core in cores]
    x, bias = torch.randn(2, 4, INPUTS, dtype=dtype), torch.randn(OUTPUTS, dtype=dtype)
    return cores, x.requires_grad_(), bias.requires_grad_()


def halves(cores):
    return build_parts(cores, next(path for path in all_paths() if path.kind == "two-sided"))


@every_path
@pytest.mark.parametrize("with_bias", [True, False])
def test_matches_a_dense_layer_in_values_and_gradients(path, with_bias):
    cores, x, bias = problem()
    inputs = [x, *cores, bias] if with_bias else [x, *cores]
    left, right = halves(cores)
    expected = functional.linear(x, (left @ right).T, bias if with_bias else None)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    y = path_linear(x, cores, path, bias if with_bias else None)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, grad), expected_grads)


def test_from_halves_it_is_the_dense_layer():
    cores, x, bias = problem()
    left, right = (half.detach().requires_grad_() for half in halves(cores))
    for some_bias in (bias, None):
        inputs = [x, left, right] if some_bias is None else [x, left, right, bias]
        y, expected = dense_linear(x, left.T, right, some_bias), functional.linear(x, (left @ right).T, some_bias)
        torch.testing.assert_close(y, expected)
        grads = (torch.autograd.grad(each.square().sum(), inputs) for each in (y, expected))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "all-in-dtype"])
def test_low_precision_error_is_like_that_of_plain_torch(dtype, autocast):
    torch.manual_seed(1)
    cores, x, bias = problem(torch.float32)
    if not autocast:
        cores, x, bias = [core.detach().to(dtype) for core in cores], x.detach().to(dtype), bias.detach().to(dtype)
    exact_left, exact_right = halves([core.detach().double() for core in cores])
    exact = functional.linear(x.double(), (exact_left @ exact_right).T, bias.double())
    runs = {path.label: lambda path=path: path_linear(x, cores, path, bias) for path in all_paths()}
    runs["from halves"] = lambda: dense_linear(x, exact_left.T.float(), exact_right.float(), bias)
    plain = functional.linear(x.to(dtype), (exact_left @ exact_right).T.to(dtype), bias.to(dtype))
    allowed = 2 * (plain.double() - exact).norm().item()
    for label, run in runs.items():
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            y = run()
        assert y.dtype == dtype, label
        error = (y.double() - exact).norm().item()
        assert error <= allowed, f"{label}: {error:.3g}, plain torch {allowed / 2:.3g}"
        if autocast:
            y.float().sum().backward()
            assert cores[0].grad is None or cores[0].grad.dtype == torch.float32


def test_a_path_for_another_layer_is_refused():
    cores, x, _ = problem()
    with pytest.raises(ValueError, match=r"x with 10 features and cores .* do not fit a path for 11 features"):
        path_linear(x[..., :10], cores, all_paths()[0])
    with pytest.raises(ValueError, match="Plan one with plan_path for this layer"):
        path_linear(x, cores[1:], all_paths()[0])
