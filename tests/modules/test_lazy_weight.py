"""hf_comera/modules/lazy_weight.py: cheap questions build nothing, real uses get the dense weight and gradients."""

import pytest
import torch
from torch.nn.functional import linear

from hf_comera.modules import TTLinear, TTMEmbedding


@pytest.fixture
def layer(monkeypatch):
    layer = TTLinear(48, 96, ranks=4)
    layer.built = 0
    dense = layer.dense

    def counted():
        layer.built += 1
        return dense()

    object.__setattr__(layer, "dense", counted)
    return layer


def test_questions_about_the_weight_build_nothing(layer):
    weight = layer.weight
    assert weight.shape == (96, 48)
    assert weight.size(0) == 96
    assert weight.dim() == weight.ndim == 2
    assert weight.numel() == 96 * 48
    assert weight.dtype == torch.float32
    assert weight.device == torch.device("cpu")
    assert weight.is_floating_point()
    assert weight.requires_grad
    assert isinstance(weight, torch.Tensor)
    assert "LazyWeight" in repr(weight)
    assert layer.built == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: linear(x, w),
        lambda x, w: x @ w.T,
        lambda x, w: torch.einsum("bi,oi->bo", x, w),
        lambda x, w: (w[3:5] * 2.0).sum(),
        lambda x, w: w.float().pow(2).mean(),
    ],
)
def test_real_uses_equal_the_dense_weight_in_value_and_gradient(use):
    layer = TTLinear(48, 96, ranks=4)
    x = torch.randn(3, 48)
    lazy, dense = use(x, layer.weight), use(x, layer.dense())
    torch.testing.assert_close(lazy, dense)
    grads = [torch.autograd.grad(value.sum(), layer.cores()) for value in (lazy, dense)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


class Product(torch.autograd.Function):
    """Stands for fused losses, which receive the weight below autograd."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def test_custom_functions_do_not_lose_gradients():
    layer = TTMEmbedding(57, 12, ranks=3)
    x = torch.randn(2, 12, requires_grad=True)
    y = Product.apply(x, layer.weight)
    torch.testing.assert_close(y, x @ layer.dense().T)
    for mine, theirs in zip(
        torch.autograd.grad(y.sum(), layer.cores()),
        torch.autograd.grad((x @ layer.dense().T).sum(), layer.cores()),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
