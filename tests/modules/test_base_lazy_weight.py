"""hf_comera/modules/base.py: cheap questions build nothing, real uses get the dense weight and gradients."""

import copy
import io

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import linear

from hf_comera.modules import TiedHead, TTLinear, TTMEmbedding
from hf_comera.modules.base import edits_left_out


@pytest.fixture
def layer():
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


class AsksForTheDtype(torch.nn.Module):
    """T5's feed-forward asks its last layer so."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        weight = self.layer.weight
        return self.layer(x.to(weight.dtype).to(weight.device)), weight.shape


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_questions_are_answered_in_compiled_code_too(backend):
    torch._dynamo.reset()
    layer = TTLinear(48, 96, ranks=4)
    asking = AsksForTheDtype(layer)
    x = torch.randn(3, 48)
    y, shape = torch.compile(asking, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(y, layer(x))
    assert shape == (96, 48)


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


def shrink(weight):
    weight /= 4


def add_to(weight):
    weight += torch.ones(96, 48)


EDITS = {
    "fill_": lambda weight: weight.fill_(0),
    "initialiser": torch.nn.init.zeros_,
    "data": lambda weight: weight.data.add_(2),
    "item": lambda weight: weight.__setitem__(0, 1.0),
    "overwrite": overwrite,
    "scaled-by-nothing": lambda weight: weight.mul_(0),
    "scaled-by-a-tensor": lambda weight: weight.mul_(torch.ones(48)),
    "add": add_to,
    "constant": lambda weight: torch.nn.init.constant_(weight, 0.5),
    "ones": torch.nn.init.ones_,
    "identity": torch.nn.init.eye_,
    "truncated": torch.nn.init.trunc_normal_,
    "orthogonal": torch.nn.init.orthogonal_,
    "xavier": torch.nn.init.xavier_uniform_,
    "method": lambda weight: weight.normal_(),
    "row": lambda weight: weight[0].zero_(),
    "row-of-data": lambda weight: weight.data[0].fill_(1),
    "rows": lambda weight: weight[1:3].t()[0:1].zero_(),
    "item-of-a-row": lambda weight: weight[0].__setitem__(slice(None), 0.0),
    "transposed": lambda weight: weight.t().zero_(),
    "property": lambda weight: weight.T.mul_(2),
    "detached": lambda weight: weight.detach().zero_(),
    "part": lambda weight: weight.chunk(2)[0].zero_(),
    "parts": lambda weight: torch._foreach_mul_(list(weight.split(16)), 2.0),
    "same-dtype": lambda weight: weight.float().zero_(),
    "flat": lambda weight: weight.data.view(-1)[3:5].zero_(),
    "reshaped": lambda weight: weight.reshape(2, -1).zero_(),
    "out": lambda weight: torch.clamp(torch.ones(96, 48), max=0.5, out=weight.data),
    "out-of-a-view": lambda weight: torch.add(torch.ones(48), 1, out=weight.data[3]),
    "foreach": lambda weight: torch._foreach_zero_([weight]),
    "foreach-copy": lambda weight: torch._foreach_copy_([weight.data], [torch.zeros(96, 48)]),
    "copy-under-another-name": lambda weight: Tensor.copy_(weight, torch.zeros(96, 48)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_that_would_be_lost_raise(edit):
    layer = TTLinear(48, 96, ranks=4)
    before = layer.dense().detach()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"TTLinear keeps as cores.*layer.load_dense\(weight\)"):
        edit(layer.weight)
    assert torch.equal(layer.dense(), before)


INITIALISERS = {
    name: EDITS[name] for name in ("fill_", "initialiser", "data", "constant", "row", "row-of-data", "method")
}


@pytest.mark.parametrize("edit", INITIALISERS.values(), ids=INITIALISERS)
def test_initialisers_of_transformers_models_leave_the_cores_alone(edit):
    layer = TTLinear(48, 96, ranks=4)
    before = layer.dense().detach()
    with torch.no_grad(), edits_left_out():
        edit(layer.weight)
        torch.nn.init.normal_(layer.weight, std=3.0)
    assert torch.equal(layer.dense(), before)


DRAWS = {
    "normal": (lambda weight: torch.nn.init.normal_(weight, std=0.5), 0.5),
    "normal-by-place": (lambda weight: torch.nn.init.normal_(weight, 0.0, 0.25), 0.25),
    "uniform": (lambda weight: torch.nn.init.uniform_(weight, -0.3, 0.3), 0.3 / 3**0.5),
    "kaiming": (torch.nn.init.kaiming_uniform_, (2 / 48) ** 0.5),
    "kaiming-fan-out": (
        lambda weight: torch.nn.init.kaiming_uniform_(weight, a=5**0.5, mode="fan_out", nonlinearity="leaky_relu"),
        (2 / 6 / 96) ** 0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("draw", "std"), DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("gated", [False, True])
def test_an_initialiser_that_asks_for_a_deviation_draws_cores_of_it(draw, std, gated):
    layer = TTLinear(48, 96, ranks=4)
    if gated:
        layer.add_rank_gates()
        layer.rank_gate_1.data.fill_(7.0)
    torch.nn.init.ones_(layer.bias)
    before = layer.dense().detach()
    result = draw(layer.weight)
    assert isinstance(result, Tensor)
    assert not torch.equal(layer.dense(), before)
    assert layer.dense().square().mean().sqrt().item() == pytest.approx(std, rel=1e-3)
    assert layer.bias.eq(1).all()
    dense = torch.empty(96, 48)
    draw(dense)
    assert dense.std().item() == pytest.approx(std, rel=0.05)


SCALINGS = {
    "mul_": (lambda weight: weight.mul_(-3), -3),
    "div_": (lambda weight: weight.div_(8), 0.125),
    "data": (lambda weight: weight.data.mul_(0.5), 0.5),
    "operator": (scale, 2),
    "division": (shrink, 0.25),
}


@pytest.mark.parametrize(("edit", "factor"), SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("layer", [TTLinear(48, 96, ranks=4), TTMEmbedding(60, 16, ranks=3)], ids=["linear", "table"])
def test_a_factor_goes_into_a_core(layer, edit, factor):
    before = layer.dense().detach()
    with torch.no_grad():
        edit(layer.weight)
    torch.testing.assert_close(layer.dense(), before * factor)


def test_a_factor_needs_gradients_off_as_for_a_parameter():
    layer = TTLinear(48, 96, ranks=4)
    with pytest.raises(RuntimeError, match="keeps as cores"):
        layer.weight.mul_(2)


def test_an_initialiser_draws_the_table_of_an_embedding_and_of_its_tied_head():
    embedding = TTMEmbedding(60, 16, ranks=4)
    torch.nn.init.normal_(embedding.weight, std=0.5)
    assert embedding.dense().square().mean().sqrt().item() == pytest.approx(0.5, rel=1e-3)
    torch.nn.init.normal_(TiedHead(embedding).weight, std=0.1)
    assert embedding.dense().square().mean().sqrt().item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(
    "draw",
    [
        lambda weight: torch.nn.init.normal_(weight, mean=1.0),
        lambda weight: torch.nn.init.normal_(weight, std=0.0),
        torch.nn.init.uniform_,
        lambda weight: torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator()),
    ],
    ids=["mean", "nothing", "positive", "generator"],
)
def test_an_initialiser_that_cores_cannot_follow_is_refused(draw):
    layer = TTLinear(48, 96, ranks=4)
    before = layer.dense().detach()
    with pytest.raises(RuntimeError, match=r"draws cores for entries of mean 0.*Use torch.nn.init.normal_"):
        draw(layer.weight)
    assert torch.equal(layer.dense(), before)


def freeze(weight):
    weight.requires_grad = False


@pytest.mark.parametrize("edit", [freeze, lambda weight: weight.requires_grad_(False)], ids=["set", "call"])
def test_freezing_by_the_weight_says_how_to_freeze(edit):
    layer = TTLinear(48, 96, ranks=4)
    with pytest.raises(RuntimeError, match=r"for p in layer.parameters\(\): p.requires_grad_\(False\).*core_0"):
        edit(layer.weight)
    assert all(parameter.requires_grad for parameter in layer.parameters())


def test_arrays_of_the_weight_cannot_be_written():
    layer = TTLinear(48, 96, ranks=4)
    array = layer.weight.detach().numpy()
    assert np.array_equal(array, layer.dense().detach().numpy())
    with pytest.raises(ValueError, match="read-only"):
        array.fill(0)
    np.array(array, copy=True).fill(0)


def test_views_of_the_weight_are_tensors_to_compute_with():
    layer = TTLinear(48, 96, ranks=4)
    dense = layer.dense()
    view = layer.weight[3:5].t()
    assert torch.equal(view, dense[3:5].t())
    assert type(view * 2) is Tensor
    assert type(view.clone()) is Tensor
    view.clone().zero_()
    grads = [torch.autograd.grad(part.square().sum(), layer.cores()) for part in (view, dense[3:5].t())]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*grads, strict=True))
    copied = copy.deepcopy(layer.weight.detach())
    assert type(copied) is Tensor
    copied.zero_()
    buffer = io.BytesIO()
    torch.save(layer.weight.detach(), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), dense)
    assert save({"weight": layer.weight.detach().contiguous()}) == save({"weight": dense.detach().contiguous()})


def test_a_parameter_made_of_the_weight_is_a_matrix_of_its_own():
    layer = TTLinear(48, 96, ranks=4)
    before = layer.dense().detach()
    linear = torch.nn.Linear(48, 96)
    linear.weight = torch.nn.Parameter(layer.weight.detach())
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1)
    linear(torch.randn(3, 48)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(linear.weight.detach(), before)
    assert torch.equal(layer.dense(), before)
    linear.weight.data.zero_()
    assert linear.weight.eq(0).all()


def test_data_is_the_weight_without_gradients(layer):
    assert layer.weight.data.shape == (96, 48)
    assert layer.built == 0
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
