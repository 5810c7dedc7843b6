"""kernels/low_rank_ffn.cu: as exact as the same steps in plain torch, whose hidden features are written out."""

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from hf_comera.ops.ffn_kernels import FFN_ACTIVATIONS, low_rank_ffn, low_rank_ffn_refusal
from hf_comera.ops.rank_activation import RANK_ACTIVATIONS
from tests.kernels.kernel_errors import DTYPES, assert_as_exact, between_nans, precision, product

TORCH_ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": lambda z: gelu(z, approximate="tanh"),
    "relu": relu,
    "silu": silu,
}
# tokens, in, hidden and out features, ranks, activation, biases, rank activation
SHAPES = [
    (40, 96, 320, 72, 32, 32, "gelu", True, None),
    (33, 64, 128, 64, 64, 24, "gelu_tanh", True, None),
    (1, 21, 45, 13, 8, 16, "relu", False, None),
    (5, 64, 72, 64, 16, 56, "silu", True, "silu"),
    (64, 8, 65, 8, 40, 8, "gelu", False, "gelu"),
    (0, 64, 64, 64, 32, 32, "gelu", True, None),
]


def operands(shape, dtype, device):
    num_tokens, in_features, hidden, out, rank_in, rank_out, _, has_biases, _ = shape
    tensors = {
        "x": torch.randn(num_tokens, in_features),
        "left_in": torch.randn(rank_in, in_features) / in_features**0.5,
        "right_in": torch.randn(rank_in, hidden) / rank_in**0.5,
        "left_out": torch.randn(rank_out, hidden) / hidden**0.5,
        "right_out": torch.randn(rank_out, out) / rank_out**0.5,
        "bias_in": torch.randn(hidden) if has_biases else None,
        "bias_out": torch.randn(out) if has_biases else None,
    }
    return {name: None if each is None else each.to(device, dtype) for name, each in tensors.items()}


def in_steps(matmul, shape, x, left_in, right_in, left_out, right_out, bias_in, bias_out):
    rank_act = (lambda code: code) if shape[-1] is None else RANK_ACTIVATIONS[shape[-1]]
    code_in = matmul(x, left_in.T)
    hidden = matmul(rank_act(code_in), right_in) + (0 if bias_in is None else bias_in)
    code_out = matmul(TORCH_ACTIVATIONS[shape[6]](hidden), left_out.T)
    return matmul(rank_act(code_out), right_out) + (0 if bias_out is None else bias_out), code_in, code_out


def one_draw(name, shape, device):
    """Results of the kernel, of plain torch and in float64."""
    tensors = operands(shape, DTYPES[name], device)
    guarded = {key: None if each is None else between_nans(each) for key, each in tensors.items()}
    in_double = {key: None if each is None else each.double() for key, each in tensors.items()}
    with precision(name):
        found = low_rank_ffn(**guarded, activation=shape[6], rank_activation=shape[-1])
    plain = in_steps(lambda a, b: product(name, a, b), shape, **tensors)
    return found, plain, in_steps(torch.matmul, shape, **in_double)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_torch(shape, name, kernels):
    num_draws = 1 if shape[0] > 8 else 16  # errors of a few numbers are more chance than anything
    draws = [one_draw(name, shape, kernels) for _ in range(num_draws)]
    found, plain, exact = (
        [torch.cat(parts) for parts in zip(*kind, strict=True)] for kind in zip(*draws, strict=True)
    )
    for mine, torchs, wanted in zip(found, plain, exact, strict=True):
        assert mine.dtype == DTYPES[name]
        assert_as_exact(name, mine, torchs, wanted)


def test_leading_axes(kernels):
    tensors = operands(SHAPES[0], torch.float32, kernels)
    flat = low_rank_ffn(**tensors, activation="relu")
    tensors["x"] = tensors["x"].unflatten(0, (5, 8))
    assert all(
        torch.equal(a.flatten(0, 1), b) for a, b in zip(low_rank_ffn(**tensors, activation="relu"), flat, strict=True)
    )


def test_every_activation_is_tested():
    assert set(TORCH_ACTIVATIONS) == set(FFN_ACTIVATIONS)


def test_says_what_it_cannot_take():
    tensors = operands((3, 8, 16, 8, 72, 8, "gelu", False, None), torch.float32, "cpu")
    biases = tensors.pop("bias_in"), tensors.pop("bias_out")
    assert biases == (None, None)
    assert "not 72 and 8" in low_rank_ffn_refusal(**tensors)
    with pytest.raises(ValueError, match="not 72 and 8"):
        low_rank_ffn(**tensors, activation="gelu")
    tensors = operands(SHAPES[0], torch.float32, "cpu")
    tensors["left_out"] = tensors["left_out"][:, 1:]
    with pytest.raises(ValueError, match="shapes do not fit"):
        low_rank_ffn(**tensors, activation="gelu")
    with pytest.raises(ValueError, match="activation='tanh'"):
        low_rank_ffn(**tensors, activation="tanh")
