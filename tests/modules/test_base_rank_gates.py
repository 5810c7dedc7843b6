"""hf_comera/modules/base.py: layers compute with their rank gates, keep them exact, fold, move and load them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_comera.modules import TiedHead, TTLinear, TTMEmbedding
from tests.dense_references import dense_matrix, dense_table

LAYERS = {
    "bias": lambda dtype: TTLinear(7, 30, ranks=4, dtype=dtype),
    "no-bias-unequal-sides": lambda dtype: TTLinear(
        12, 30, in_factors=(4, 3), out_factors=(2, 3, 5), ranks=(4, 5, 3, 2), bias=False, dtype=dtype
    ),
    "transposed": lambda dtype: TTLinear(48, 10, ranks=4, transposed=True, dtype=dtype),
    "embedding": lambda dtype: TTMEmbedding(57, 11, ranks=4, dtype=dtype),
    "one-core": lambda dtype: TTMEmbedding(5, 7, in_factors=(5,), out_factors=(7,), dtype=dtype),
    "tied-head": lambda dtype: TiedHead(
        TTMEmbedding(57, 11, ranks=4, dtype=dtype), nn.Parameter(torch.randn(57, dtype=dtype))
    ),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())


def train_of(layer):
    """The module that owns the cores."""
    return layer.source if isinstance(layer, TiedHead) else layer


def inputs(layer, dtype=torch.float64):
    if isinstance(layer, TTMEmbedding):
        return torch.randint(0, layer.num_embeddings, (2, 5))
    return torch.randn(2, 3, layer.in_features, dtype=dtype, requires_grad=True)


def gated(make, dtype=torch.float64):
    """A layer with random gates, some of them zero or negative."""
    layer = make(dtype)
    train_of(layer).add_rank_gates()
    for gate in train_of(layer).rank_gates():
        gate.data.normal_()
        gate.data[0] = 0
    return layer


def reference_cores(train):
    """``D_k`` as a matrix, multiplied into the core before it."""
    *others, last = train.cores()
    pairs = zip(others, train.rank_gates(), strict=True)
    return [*(torch.tensordot(core, torch.diag(gate), dims=1) for core, gate in pairs), last]


def reference(layer, x):
    """What ``layer`` must compute on ``x``, from dense matrices."""
    train = train_of(layer)
    cores = reference_cores(train)
    if isinstance(train, TTMEmbedding):
        table = dense_table(cores, train.num_embeddings, train.embedding_dim)
        return functional.linear(x, table, layer.bias) if isinstance(layer, TiedHead) else table[x]
    sizes = len(train.in_factors), train.in_features, train.out_features
    return functional.linear(x, dense_matrix(cores, *sizes).T, train.bias)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_ones_change_no_bit(make, dtype):
    layer = make(dtype)
    x = inputs(layer, dtype)
    before = layer(x)
    train_of(layer).add_rank_gates()
    assert torch.equal(layer(x), before)
    gates = train_of(layer).rank_gates()
    assert [gate.numel() for gate in gates] == list(train_of(layer).ranks)
    assert all(gate.dtype == torch.float32 and gate.requires_grad for gate in gates)


@every_layer
def test_small_negative_and_zero_gates_are_left_alone_and_can_rise(make):
    layer = make(torch.float32)
    train_of(layer).add_rank_gates()
    with torch.no_grad():
        for gate in train_of(layer).rank_gates():
            gate[0], gate[-1] = -1e-6, 0.0
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.eval()(inputs(layer, torch.float32)).square().sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert all(gate.grad[-1] != 0 for gate in train_of(layer).rank_gates() if gate.numel() > 1)


@every_layer
def test_gates_equal_diagonal_matrices_in_output_and_gradients(make):
    layer = gated(make)
    x = inputs(layer)
    differentiable = [p for p in (x, *layer.parameters(), *train_of(layer).parameters()) if p.requires_grad]
    differentiable = list(dict.fromkeys(differentiable))
    result, expected = layer(x), reference(layer, x)
    torch.testing.assert_close(result, expected)
    weights = torch.randn_like(expected)
    grads = [torch.autograd.grad((out * weights).sum(), differentiable) for out in (result, expected)]
    torch.testing.assert_close(*grads)


DENSE = {name: make for name, make in LAYERS.items() if name != "tied-head"}
every_dense_layer = pytest.mark.parametrize("make", DENSE.values(), ids=DENSE.keys())


@every_dense_layer
@pytest.mark.parametrize("weight", [lambda layer: layer.dense(), lambda layer: layer.weight], ids=["dense", "lazy"])
def test_dense_weights_honour_gates_and_give_them_gradients(make, weight):
    layer = gated(make)
    cores = reference_cores(layer)
    if isinstance(layer, TTMEmbedding):
        expected = dense_table(cores, layer.num_embeddings, layer.embedding_dim)
    else:
        expected = dense_matrix(cores, len(layer.in_factors), layer.in_features, layer.out_features)
        expected = expected if layer.transposed else expected.T
    factor = torch.randn_like(expected)
    torch.testing.assert_close(weight(layer) * 1, expected)
    grads = [torch.autograd.grad((w * factor).sum(), layer.tt_parameters()) for w in (weight(layer), expected)]
    torch.testing.assert_close(*grads)


def test_custom_functions_on_the_lazy_weight_reach_the_gates():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return torch.ops.aten.mul.Scalar(weight, 2.0)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    layer = gated(LAYERS["bias"])
    grads = [
        torch.autograd.grad(w.sum(), layer.tt_parameters()) for w in (Double.apply(layer.weight), 2 * layer.dense())
    ]
    torch.testing.assert_close(*grads)


def test_a_lazy_weight_with_only_gates_to_train_says_so():
    layer = gated(LAYERS["bias"])
    for core in layer.cores():
        core.requires_grad_(False)
    assert layer.weight.requires_grad
    layer.rank_gate_0.requires_grad_(False)
    for gate in layer.rank_gates():
        gate.requires_grad_(False)
    assert not layer.weight.requires_grad


@every_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_folding_changes_rounding_only_and_leaves_no_gates(make, dtype):
    layer = gated(make, dtype)
    names, cores = [name for name, _ in make(dtype).named_parameters()], train_of(layer).cores()
    x = inputs(layer, dtype)
    before = layer(x)
    train_of(layer).fold_rank_gates()
    if dtype == torch.float64:
        torch.testing.assert_close(layer(x), before)
    else:
        assert torch.equal(layer(x), before)  # gates are multiplied in and rounded at every use
    assert [name for name, _ in layer.named_parameters()] == names
    assert train_of(layer).rank_gates() == []
    assert all(new is old for new, old in zip(train_of(layer).cores(), cores, strict=True))


@every_dense_layer
def test_new_cores_come_with_new_gates(make):
    layer = gated(make)
    dense = make(torch.float64).dense().detach()
    layer.load_dense(dense)
    assert all(gate.eq(1).all() for gate in layer.rank_gates())
    other = make(torch.float64)
    layer = gated(make)
    layer.load_cores([core.detach() for core in other.cores()])
    torch.testing.assert_close(layer.dense(), other.dense())
    assert [gate.numel() for gate in layer.rank_gates()] == list(other.ranks)


def test_cores_of_other_ranks_bring_gates_of_their_ranks():
    layer = gated(LAYERS["bias"])
    layer.load_cores(TTLinear(7, 30, ranks=2, dtype=torch.float64).cores())
    assert [gate.tolist() for gate in layer.rank_gates()] == [[1.0] * rank for rank in layer.ranks]


@every_layer
def test_drawing_new_cores_sets_gates_to_one(make):
    layer = gated(make)
    train_of(layer).reset_parameters()
    assert all(gate.eq(1).all() for gate in train_of(layer).rank_gates())


CASTS = {
    "bfloat16": (lambda layer: layer.bfloat16(), torch.bfloat16),
    "half": (lambda layer: layer.half(), torch.float16),
    "to-dtype": (lambda layer: layer.to(torch.bfloat16), torch.bfloat16),
    "to-device": (lambda layer: layer.to("cpu"), torch.float32),
    "in-a-model": (lambda layer: nn.Sequential(layer).half()[0], torch.float16),
}


@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize("name", ["bias", "embedding"])
def test_casts_leave_gates_exact_and_keep_the_objects(name, cast, dtype):
    layer = gated(LAYERS[name], torch.float32)
    before, values = list(layer.parameters()), [gate.detach().clone() for gate in layer.rank_gates()]
    layer(inputs(layer, torch.float32)).sum().backward()
    cast(layer)
    assert all(new is old for new, old in zip(layer.parameters(), before, strict=True))
    assert all(torch.equal(gate, value) for gate, value in zip(layer.rank_gates(), values, strict=True))
    assert {gate.dtype for gate in layer.rank_gates()} == {torch.float32}
    assert {core.dtype for core in layer.cores()} == {dtype}
    layer(inputs(layer, dtype)).sum().backward()
    assert {gate.grad.dtype for gate in layer.rank_gates()} == {torch.float32}


def test_gates_of_float64_layers_are_float64():
    layer = LAYERS["bias"](torch.float64)
    layer.add_rank_gates()
    assert {gate.dtype for gate in layer.rank_gates()} == {torch.float64}
    assert {gate.dtype for gate in layer.float().rank_gates()} == {torch.float32}


@every_layer
def test_copies_have_their_own_gates(make):
    layer = gated(make)
    x = inputs(layer)
    expected = layer(x)
    container = nn.ModuleList([train_of(layer), layer])
    twin = copy.deepcopy(container)[1]
    for gate in train_of(layer).rank_gates():
        gate.data.zero_()
    assert torch.equal(twin(x), expected)


def test_gates_of_frozen_cores_are_frozen():
    layer = LAYERS["bias"](torch.float32).requires_grad_(False)
    layer.add_rank_gates()
    assert not any(gate.requires_grad for gate in layer.rank_gates())


@pytest.mark.parametrize("name", ["bias", "embedding", "tied-head"])
def test_gated_layers_compile_as_one_graph(name):
    torch._dynamo.reset()
    layer = gated(LAYERS[name])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = inputs(layer)
    grads = [
        torch.autograd.grad(out.square().sum(), train_of(layer).tt_parameters()) for out in (compiled(x), layer(x))
    ]
    torch.testing.assert_close(*grads)
