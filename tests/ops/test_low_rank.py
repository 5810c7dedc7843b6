"""hf_comera/ops/low_rank.py: the op agrees with the dense matrix, in values, gradients, precision and memory."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from hf_comera.ops import tt_linear
from hf_comera.ops.halves import layer_halves
from hf_comera.ops.low_rank import WORTH_A_RANK, bias_as_rank, from_latent, to_latent
from hf_comera.tt.cores import draw_cores
from tests.dense_references import dense_halves, dense_matrix, random_cores

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


def reference(x, cores, num_in, bias, out_features):
    """The layer as one with the dense matrix."""
    return functional.linear(x, dense_matrix(cores, num_in, x.shape[-1], out_features).T, bias)


@pytest.mark.parametrize(("in_factors", "out_factors", "rank", "in_features", "out_features"), LAYERS)
def test_matches_dense_and_passes_gradcheck(in_factors, out_factors, rank, in_features, out_features):
    cores, x, bias = problem(in_factors, out_factors, rank, in_features, out_features)
    for some_bias in (bias, None):
        ours = tt_linear(x, cores, len(in_factors), some_bias, out_features)
        expected = reference(x, cores, len(in_factors), some_bias, out_features)
        torch.testing.assert_close(ours, expected)
        inputs = [x, *cores] if some_bias is None else [x, *cores, bias]
        grad_y = torch.randn_like(ours)
        torch.testing.assert_close(
            torch.autograd.grad(ours, inputs, grad_y), torch.autograd.grad(expected, inputs, grad_y)
        )

    def op(x, bias, *cores):
        return tt_linear(x, list(cores), len(in_factors), bias, out_features)

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
    ours = tt_linear(x, frozen, 2)
    expected = reference(x, frozen, 2, None, 8)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_second_derivatives():
    cores, x, bias = problem((2, 3), (3, 2), 2, 6, 5, (2,))

    def op(x, *cores):
        return tt_linear(x, list(cores), 2, bias, 5)

    assert torch.autograd.gradgradcheck(op, (x, *cores))


def test_the_code_has_zeros_as_padding():
    cores, x, _ = problem((2, 3), (4, 2), 3, 6, 8)
    left, _ = layer_halves(cores, 2, 6, 8)
    latent = to_latent(x, left)
    torch.testing.assert_close(latent[..., :3], x @ dense_halves(cores, 2, 6, 8)[0])
    assert latent.shape[-1] == 8
    assert not latent[..., 3:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "all-in-dtype"])
def test_low_precision_error_is_at_most_twice_that_of_plain_torch(dtype, autocast):
    cores = random_cores((8, 6), (6, 8), 12, dtype=torch.float32)
    draw_cores([core.data for core in cores], 0.1)
    x = torch.randn(64, 48)
    if autocast:
        exact = x.double() @ dense_matrix([core.detach().double() for core in cores], 2, 48, 48)
        dense = dense_matrix([core.detach() for core in cores], 2, 48, 48)
        with torch.autocast("cpu", dtype=dtype):
            ours, plain = tt_linear(x, cores, 2), x @ dense
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
    assert of_batch_size == [(500, 16), (500, 48)], "x and the latent, rank 12 padded to 16"


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


ROWS = WORTH_A_RANK // 64


def product_with_padding(latent, right, bias, change=bias_as_rank):
    """``latent @ right + bias`` with the rank padded to 8, so that ``change`` finds what is left of it."""
    rank = right.shape[0]
    padded = functional.pad(latent, (0, 8 - rank)), functional.pad(right, (0, 0, 0, 8 - rank))
    *parts, bias = change(*padded, bias, rank)
    assert (bias is None) == (change is bias_as_rank)
    return from_latent(*parts, bias)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str
)
@pytest.mark.parametrize("rank", [1, 6, 7])
def test_bias_as_rank_computes_the_same(rank, dtype, tolerance):
    shapes = (2, ROWS // 2, rank), (rank, 64), (64,), (2, ROWS // 2, 64)
    *inputs, grad_y = (torch.randn(shape, dtype=dtype) for shape in shapes)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    ours, expected = (product_with_padding(*inputs), inputs[0].double() @ inputs[1].double() + inputs[2].double())
    found = ours, *torch.autograd.grad(ours, inputs, grad_y)
    wanted = expected, *torch.autograd.grad(expected, inputs, grad_y.double())
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize(
    ("rank", "has_bias", "rows"),
    [
        pytest.param(8, True, ROWS, id="no-rank-to-spare"),
        pytest.param(6, False, ROWS, id="no-bias"),
        pytest.param(6, True, ROWS - 1, id="small"),
        pytest.param(6, True, 0, id="empty"),
    ],
)
def test_bias_stays_a_bias(rank, has_bias, rows):
    parts = torch.randn(rows, 8), torch.randn(8, 64), torch.randn(64) if has_bias else None
    assert all(one is other for one, other in zip(bias_as_rank(*parts, rank), parts, strict=True))


def test_bias_as_rank_with_frozen_parts_autocast_and_inference():
    latent, right, bias = torch.randn(ROWS, 6), torch.randn(6, 64), torch.randn(64)
    expected = torch.addmm(bias, latent, right)
    with torch.inference_mode():
        torch.testing.assert_close(product_with_padding(latent, right, bias), expected)
    with torch.autocast("cpu", torch.bfloat16):
        y = product_with_padding(latent.bfloat16(), right.bfloat16(), bias.requires_grad_())
    assert y.dtype == torch.bfloat16
    assert (y - expected).norm() <= 0.02 * expected.norm()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), bias)[0], torch.full((64,), float(ROWS)))


def test_an_infinite_bias_spoils_no_gradient_but_its_own():
    latent, right, bias = (torch.randn(shape, requires_grad=True) for shape in ((ROWS, 6), (6, 64), (64,)))
    y = product_with_padding(latent, right, torch.where(torch.arange(64) == 3, -torch.inf, bias))
    assert y[:, 3].eq(-torch.inf).all()
    for grad in torch.autograd.grad(y.masked_fill(y.isinf(), 0).square().sum(), [latent, right, bias]):
        assert grad.isfinite().all()


def test_bias_as_rank_of_fake_tensors_leaves_nothing_behind():
    with FakeTensorMode():
        assert product_with_padding(torch.empty(ROWS, 5), torch.empty(5, 64), torch.empty(64)).shape == (ROWS, 64)
    assert type(product_with_padding(torch.randn(ROWS, 5), torch.randn(5, 64), torch.randn(64))) is torch.Tensor


def test_bias_as_rank_spares_passes_over_the_output():
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((ROWS, 6), (6, 64), (64,))]

    def passes(change):
        with torch.profiler.profile(record_shapes=True) as profile:
            y = product_with_padding(*inputs, change)
            torch.autograd.grad(y, inputs, torch.ones_like(y))
        seen = [event for event in profile.events() if event.name in {"aten::sum", "aten::addmm", "aten::mm"}]
        return sorted(event.name for event in seen if [ROWS, 64] in event.input_shapes or event.name == "aten::addmm")

    assert passes(bias_as_rank) == ["aten::mm"] * 2
    assert passes(lambda latent, right, bias, rank: (latent, right, bias)) == [
        "aten::addmm",
        *["aten::mm"] * 2,
        "aten::sum",
    ]
