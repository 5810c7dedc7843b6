"""hf_comera/ops/tt_linear.py: the op agrees with the dense matrix, in values, gradients, precision and memory."""

import math

import pytest
import torch

from hf_comera.ops import tt_linear
from hf_comera.ops.tt_linear import _tt_linear
from hf_comera.tt.cores import draw_cores
from tests.dense_references import dense_matrix, random_cores

LAYERS = [  # (in_factors, out_factors, rank, in_features, out_features)
    pytest.param((4, 6), (6, 4), 3, 24, 24, id="two-factors"),
    pytest.param((2, 3, 2), (3, 2, 2), 2, 12, 12, id="three-factors"),
    pytest.param((2, 3, 2, 2), (3, 2, 2, 2), 2, 24, 24, id="four-factors"),
    pytest.param((5,), (7,), 1, 5, 7, id="one-factor-rank-one"),
    pytest.param((2, 3), (2, 2, 3), 2, 6, 12, id="unequal-sides"),
    pytest.param((6,), (2, 2, 3), 9, 6, 12, id="one-against-three"),
    pytest.param((1, 5), (5, 1), 3, 5, 5, id="factors-of-one"),
    pytest.param((3, 3), (3, 4), 4, 7, 11, id="padded"),
]


def problem(in_factors, out_factors, rank, in_features, out_features, lead=(2, 3)):
    cores = random_cores(in_factors, out_factors, rank)
    x = torch.randn(*lead, in_features, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(out_features, dtype=torch.float64, requires_grad=True)
    return cores, x, bias


@pytest.mark.parametrize(("in_factors", "out_factors", "rank", "in_features", "out_features"), LAYERS)
def test_matches_dense_and_passes_gradcheck(in_factors, out_factors, rank, in_features, out_features):
    cores, x, bias = problem(in_factors, out_factors, rank, in_features, out_features)
    dense = dense_matrix(cores, len(in_factors), in_features, out_features)
    ours = tt_linear(x, cores, len(in_factors), bias, out_features)
    torch.testing.assert_close(ours, x @ dense + bias)
    torch.testing.assert_close(tt_linear(x, cores, len(in_factors), None, out_features), x @ dense)

    def op(x, bias, *cores):  # both outputs: the code is differentiable too
        return _tt_linear(x, list(cores), bias, len(in_factors), out_features)

    assert torch.autograd.gradcheck(op, (x, bias, *cores))


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 0, 3), (2, 1, 3)], ids=str)
def test_any_leading_shape_also_empty(lead):
    cores, x, bias = problem((2, 3), (4, 2), 3, 6, 8, lead)
    y = tt_linear(x, cores, 2, bias)
    assert y.shape == (*lead, 8)
    torch.testing.assert_close(y, x @ dense_matrix(cores, 2, 6, 8) + bias)
    y.sum().backward()
    assert all(core.grad.shape == core.shape for core in cores)


def test_strided_input_and_frozen_parts():
    cores, _, _ = problem((2, 3), (4, 2), 3, 6, 8)
    x = torch.randn(6, 5, dtype=torch.float64).T.requires_grad_()
    frozen = [core.detach() for core in cores]
    torch.testing.assert_close(tt_linear(x, frozen, 2), x @ dense_matrix(frozen, 2, 6, 8))
    (grad,) = torch.autograd.grad(tt_linear(x, frozen, 2).sum(), x)
    torch.testing.assert_close(grad, dense_matrix(frozen, 2, 6, 8).sum(1).expand(5, 6))


def test_opcheck():
    cores, x, bias = problem((2, 3), (4, 2), 3, 6, 7)
    torch.library.opcheck(_tt_linear, (x, cores, bias, 2, 7))
    torch.library.opcheck(_tt_linear, (x, cores, None, 2, 7), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "all-in-dtype"])
def test_low_precision_error_is_at_most_twice_that_of_plain_torch(dtype, autocast):
    cores = random_cores((8, 6), (6, 8), 12, dtype=torch.float32)
    draw_cores([core.data for core in cores], 0.1)
    x = torch.randn(64, 48)
    exact = x.double() @ dense_matrix([core.detach().double() for core in cores], 2, 48, 48)
    dense = dense_matrix([core.detach() for core in cores], 2, 48, 48)
    if autocast:
        with torch.autocast("cpu", dtype=dtype):
            ours = tt_linear(x, cores, 2)
            plain = torch.nn.functional.linear(x, dense.T)
        assert ours.dtype == dtype
        ours.float().sum().backward()
        assert cores[0].grad.dtype == torch.float32
    else:
        low = [core.detach().to(dtype) for core in cores]
        exact = x.to(dtype).double() @ dense_matrix([core.double() for core in low], 2, 48, 48)
        ours, plain = tt_linear(x.to(dtype), low, 2), x.to(dtype) @ dense_matrix(low, 2, 48, 48)
    ours_error = (ours.double() - exact).norm().item()
    plain_error = (plain.double() - exact).norm().item()
    assert ours_error <= 2 * plain_error, f"op {ours_error:.3g}, plain torch {plain_error:.3g}"


def test_saved_for_backward_are_x_and_the_code_only():
    cores = random_cores((8, 6), (6, 8), 12, dtype=torch.float32)
    x = torch.randn(500, 48, requires_grad=True)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        tt_linear(x, cores, 2)
    of_batch_size = sorted(tuple(t.shape) for t in saved.values() if t.shape[0] == 500)
    assert of_batch_size == [(500, 16), (500, 48)], "x and the code, rank 12 padded to 16"


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Entries of the largest tensor that any operation makes, below autograd."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_no_dense_matrix_is_made_in_forward_or_backward():
    cores = random_cores((16, 32), (32, 16), 4, dtype=torch.float32)
    x = torch.randn(3, 512, requires_grad=True)
    with LargestTensor() as mode:
        tt_linear(x, cores, 2).sum().backward()
    assert 0 < mode.largest < 512 * 512 / 8
    assert mode.largest < math.prod((512, 4)) * 8


def test_input_that_the_cores_cannot_cover_is_refused():
    cores, _, _ = problem((2, 3), (4, 2), 3, 6, 8)
    with pytest.raises(ValueError, match="x has 7 features, but the 2 input cores cover 6"):
        tt_linear(torch.randn(2, 7, dtype=torch.float64), cores, 2)
