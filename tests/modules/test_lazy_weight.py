"""hf_comera/modules/lazy_weight.py: cheap questions build nothing, real uses get the dense weight and gradients."""

import pytest
import torch
from torch.nn.functional import linear

from hf_comera.modules import TiedHead, TTLinear, TTMEmbedding
from hf_comera.modules.lazy_weight import edits_left_out


@pytest.fixture(params=[None, "silu"])
def layer(request):
    layer = TTLinear(48, 96, ranks=4, rank_activation=request.param)
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


real_uses = pytest.mark.parametrize(
    "use",
    [
        lambda x, w: linear(x, w),
        lambda x, w: x @ w.T,
        lambda x, w: torch.einsum("bi,oi->bo", x, w),
        lambda x, w: (w[3:5] * 2.0).sum(),
        lambda x, w: w.float().pow(2).mean(),
    ],
)


@real_uses
def test_real_uses_equal_the_dense_weight_in_value_and_gradient(use):
    layer = TTLinear(48, 96, ranks=4)
    x = torch.randn(3, 48)
    lazy, dense = use(x, layer.weight), use(x, layer.dense())
    torch.testing.assert_close(lazy, dense)
    grads = [torch.autograd.grad(value.sum(), layer.cores()) for value in (lazy, dense)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


@real_uses
def test_real_uses_raise_where_there_is_no_dense_weight(use):
    layer = TTLinear(48, 96, ranks=4, rank_activation="silu")
    with pytest.raises(ValueError, match="rank_activation='silu' between its halves, so no dense weight"):
        use(torch.randn(3, 48), layer.weight)


class AsksForTheDtype(torch.nn.Module):
    """T5's feed-forward asks its last layer so."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        weight = self.layer.weight
        return self.layer(x.to(weight.dtype).to(weight.device)), weight.shape


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("rank_activation", [None, "silu"])
def test_questions_are_answered_in_compiled_code_too(rank_activation, backend):
    torch._dynamo.reset()
    layer = TTLinear(48, 96, ranks=4, rank_activation=rank_activation)
    asking = AsksForTheDtype(layer)
    x = torch.randn(3, 48)
    y, shape = torch.compile(asking, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(y, layer(x))
    assert shape == (96, 48)


def test_computing_with_a_weight_that_is_not_there_gives_nan_in_compiled_code():
    torch._dynamo.reset()
    layer = TTLinear(48, 96, ranks=4, rank_activation="silu")
    compiled = torch.compile(lambda x: linear(x, layer.weight), backend="eager", fullgraph=True)
    assert compiled(torch.randn(3, 48)).isnan().all()


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


def overwrite(weight):
    weight.data = torch.zeros(96, 48)


def scale(weight):
    weight *= 2


def freeze(weight):
    weight.requires_grad = False


EDITS = {
    "fill_": lambda weight: weight.fill_(0),
    "initialiser": torch.nn.init.zeros_,
    "data": lambda weight: weight.data.mul_(2),
    "item": lambda weight: weight.__setitem__(0, 1.0),
    "overwrite": overwrite,
    "scale": scale,
    "freeze": freeze,
    "freeze_": lambda weight: weight.requires_grad_(False),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_that_would_be_lost_raise(edit):
    layer = TTLinear(48, 96, ranks=4)
    before = layer.dense().detach()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"TTLinear keeps as cores.*layer.load_dense\(weight\)"):
        edit(layer.weight)
    with edits_left_out():  # initialisers of Transformers
        edit(layer.weight)
    assert torch.equal(layer.dense(), before)


def test_data_is_the_weight_without_gradients(layer):
    assert layer.weight.data.shape == (96, 48)
    assert layer.built == 0
    if layer.rank_activation is None:
        data = layer.weight.data * 1
        assert not data.requires_grad
        torch.testing.assert_close(data, layer.dense().detach())


def test_tied_weights_have_one_address():
    embedding = TTMEmbedding(60, 16, ranks=4)
    assert TiedHead(embedding).weight.data_ptr() == embedding.weight.data_ptr()
    assert TTMEmbedding(60, 16, ranks=4).weight.data_ptr() != embedding.weight.data_ptr()


def test_a_frozen_core_has_no_gradient_below_autograd():
    layer = TTLinear(48, 96, ranks=4)
    layer.core_1.requires_grad_(False)
    Product.apply(torch.randn(3, 48), layer.weight).sum().backward()
    assert [core.grad is None for core in layer.cores()] == [False, True, False, False, False, False]
