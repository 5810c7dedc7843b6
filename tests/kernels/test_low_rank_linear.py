"""kernels/low_rank_linear.cu: as exact as plain torch at every shape, and writes nothing but its results."""

import pytest
import torch

from hf_comera.ops.cuda.low_rank_linear import low_rank_linear
from tests.kernels.kernel_errors import DTYPES, assert_as_exact, between_nans, precision, product

# tokens, in features, out features, rank, bias
SHAPES = [
    (64, 256, 192, 32, True),
    (33, 70, 101, 8, False),
    (1, 64, 64, 40, True),
    (45, 96, 72, 128, True),
    (5, 7, 9, 64, False),
    (32, 8, 1, 16, True),
    (2, 1, 8, 24, False),
    (40, 200, 136, 96, True),
    (31, 33, 64, 120, False),
    (0, 64, 48, 32, True),
]


def operands(shape, dtype, device):
    num_tokens, in_features, out_features, rank, has_bias = shape
    x = torch.randn(num_tokens, in_features)
    left = torch.randn(rank, in_features) / in_features**0.5
    right = torch.randn(rank, out_features) / rank**0.5
    bias = torch.randn(out_features) if has_bias else None
    return [None if each is None else each.to(device, dtype) for each in (x, left, right, bias)]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_torch(shape, name, kernels):
    x, left, right, bias = operands(shape, DTYPES[name], kernels)
    with precision(name):
        y, latent = low_rank_linear(*[None if each is None else between_nans(each) for each in (x, left, right, bias)])
    assert y.dtype == latent.dtype == x.dtype
    zero = x.new_zeros(()) if bias is None else bias
    code_torch = product(name, x, left.T)
    y_torch = product(name, code_torch, right) + zero
    code_exact = x.double() @ left.double().T
    y_exact = code_exact @ right.double() + zero.double()
    assert_as_exact(name, latent, code_torch, code_exact)
    assert_as_exact(name, y, y_torch, y_exact)


def test_leading_axes_and_strides(kernels):
    x = torch.randn(40, 3, 5, device=kernels).transpose(0, 2)  # (5, 3, 40), not contiguous
    left, right = torch.randn(40, 16, device=kernels).T, torch.randn(24, 16, device=kernels).T
    y, latent = low_rank_linear(x, left, right)
    assert (y.shape, latent.shape) == ((5, 3, 24), (5, 3, 16))
    torch.testing.assert_close(y, x @ left.T @ right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_may_start_anywhere(name, kernels):
    x, left, right, bias = operands(SHAPES[0], DTYPES[name], kernels)
    shifted = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    with precision(name):
        y, latent = low_rank_linear(shifted, left, right, bias)
        y_aligned, code_aligned = low_rank_linear(x, left, right, bias)
    assert torch.equal(y, y_aligned)
    assert torch.equal(latent, code_aligned)


@pytest.mark.parametrize("name", DTYPES)
def test_rows_of_zeros_make_columns_of_zeros(name, kernels):
    x, left, right, _ = operands(SHAPES[0], DTYPES[name], kernels)
    left[20:], right[20:] = 0.0, 0.0
    with precision(name):
        y, latent = low_rank_linear(x, left, right)
        y_short, _ = low_rank_linear(x, left[:24], right[:24])
    assert not latent[:, 20:].any()
    assert torch.equal(y, y_short)


def test_bias_is_taken_in_the_dtype_of_the_input(kernels):
    x, left, right, bias = operands(SHAPES[0], torch.bfloat16, kernels)
    exact = bias.float() + 1e-4  # not a bf16 number
    assert torch.equal(low_rank_linear(x, left, right, exact)[0], low_rank_linear(x, left, right, exact.bfloat16())[0])


def test_nothing_but_the_results_is_written(kernels, monkeypatch):
    x, left, right, bias = operands((33, 70, 101, 8, True), torch.bfloat16, kernels)
    buffers = []

    def new_empty(self, *shape, **options):
        size = torch.Size(shape).numel()
        buffers.append(torch.full((size + 256,), 7.0, dtype=self.dtype, device=self.device))
        return buffers[-1][128 : 128 + size].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    low_rank_linear(x, left, right, bias)
    monkeypatch.undo()
    assert len(buffers) == 2
    for buffer in buffers:
        assert (buffer[:128] == 7).all()
        assert (buffer[-128:] == 7).all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 3.4028e38, float("nan")], ids=str)
def test_overflows_where_torch_does(value, name, kernels):
    """What is not finite in torch is not finite here: the same, but NaN for infinity where parts are subtracted."""
    x, left, right = (torch.rand(shape, device=kernels) + 1 for shape in ((40, 24), (16, 24), (16, 20)))
    x[3, 5], x[35, 20] = value, value
    x, left, right = (each.to(DTYPES[name]) for each in (x, left, right))
    with precision(name):
        found = low_rank_linear(x, left, right, None)
        latent = product(name, x, left.T)
        expected = (product(name, latent, right), latent)
    for one, other in zip(found, expected, strict=True):
        if name == "fp32":
            one, other = (torch.where(each.isfinite(), each, float("nan")) for each in (one, other))
        torch.testing.assert_close(one, other, rtol=2e-2, atol=0, equal_nan=True)
