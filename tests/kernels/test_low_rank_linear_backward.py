"""kernels/low_rank_linear_backward.cu: gradients as exact as plain torch's, the same bits each time."""

import pytest
import torch

from hf_comera.ops.cuda.low_rank_linear import low_rank_linear_backward
from tests.kernels.kernel_errors import DTYPES, assert_as_exact, between_nans, precision, product

# tokens, in features, out features, rank, gradient of the latent
SHAPES = [
    (130, 128, 192, 32, False),
    (700, 64, 64, 16, True),  # many chunks
    (33, 70, 101, 8, True),
    (1, 64, 64, 40, False),
    (70, 96, 72, 128, True),
    (5, 7, 9, 64, False),
    (66, 1, 8, 24, True),
    (31, 65, 1, 96, False),
]


def operands(shape, dtype, device):
    num_tokens, in_features, out_features, rank, has_grad_code = shape
    tensors = {
        "grad_y": torch.randn(num_tokens, out_features),
        "grad_latent": torch.randn(num_tokens, rank) if has_grad_code else None,
        "x": torch.randn(num_tokens, in_features),
        "latent": torch.randn(num_tokens, rank),
        "left": torch.randn(rank, in_features) / in_features**0.5,
        "right": torch.randn(rank, out_features) / rank**0.5,
    }
    return {name: None if each is None else each.to(device, dtype) for name, each in tensors.items()}


def gradients(matmul, grad_y, grad_latent, x, latent, left, right):
    """dx, dleft, dright, dbias in the dtype of the operands."""
    dlatent = matmul(grad_y, right.T)
    if grad_latent is not None:
        dlatent = dlatent + grad_latent
    return matmul(dlatent, left), matmul(dlatent.T, x), matmul(latent.T, grad_y), grad_y.sum(0)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_torch(shape, name, kernels):
    tensors = operands(shape, DTYPES[name], kernels)
    guarded = {key: None if each is None else between_nans(each) for key, each in tensors.items()}
    with precision(name):
        found = low_rank_linear_backward(**guarded)
    in_double = {key: None if each is None else each.double() for key, each in tensors.items()}
    exact = gradients(torch.matmul, **in_double)
    plain = gradients(lambda a, b: product(name, a, b), **tensors)
    assert [grad.dtype for grad in found] == [DTYPES[name], *[torch.float32] * 3]
    for mine, torchs, wanted in zip(found, plain, exact, strict=True):
        assert_as_exact(name, mine, torchs, wanted)


def test_no_tokens_give_zeros(kernels):
    dx, *grads = low_rank_linear_backward(**operands((0, 64, 40, 32, True), torch.float32, kernels))
    assert dx.shape == (0, 64)
    assert [grad.shape for grad in grads] == [(32, 64), (32, 40), (40,)]
    assert not any(grad.any() for grad in grads)


def test_the_same_bits_each_time(kernels):
    tensors = operands(SHAPES[1], torch.bfloat16, kernels)
    first, again = (low_rank_linear_backward(**tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_dx_only_where_it_is_wanted(kernels):
    tensors = operands(SHAPES[0], torch.float32, kernels)
    dx, *grads = low_rank_linear_backward(**tensors, needs_dx=False)
    assert dx is None
    assert all(torch.equal(a, b) for a, b in zip(grads, low_rank_linear_backward(**tensors)[1:], strict=True))


def test_leading_axes(kernels):
    tensors = operands((30, 64, 40, 32, True), torch.float32, kernels)
    flat = low_rank_linear_backward(**tensors)
    for name in ("grad_y", "grad_latent", "x", "latent"):
        tensors[name] = tensors[name].unflatten(0, (5, 6))
    deep = low_rank_linear_backward(**tensors)
    assert deep[0].shape == (5, 6, 64)
    assert torch.equal(deep[0].flatten(0, 1), flat[0])
    assert all(torch.equal(a, b) for a, b in zip(deep[1:], flat[1:], strict=True))
