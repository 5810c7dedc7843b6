"""hf_comera/modules/base.py: a layer without ranks is its bias or zero, in every use that a layer has."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_comera.modules import TiedEmbedding, TiedHead, TTLinear, TTMEmbedding


def removed_linear(bias=True, **settings):
    layer = TTLinear(7, 30, ranks=[0] * 5, bias=bias, **settings)
    if bias:
        layer.bias.data.normal_()
    return layer


def removed_embedding(**settings):
    return TTMEmbedding(57, 11, ranks=[0] * 3, **settings)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_linear_layer_is_its_bias_or_zero(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    layer = removed_linear(dtype=dtype)
    assert torch.equal(layer(x), layer.bias.expand(*shape[:-1], 30))
    layer = removed_linear(bias=False, dtype=dtype)
    assert torch.equal(layer(x), torch.zeros(*shape[:-1], 30, dtype=dtype))


def test_the_bias_has_its_gradient_and_the_cores_ask_for_none():
    layer = removed_linear()
    layer(torch.randn(2, 3, 7, requires_grad=True)).sum().backward()
    assert layer.bias.grad.tolist() == [6.0] * 30
    assert not any(core.requires_grad for core in layer.cores())  # DDP waits for all that do


def test_wrong_inputs_are_still_named():
    with pytest.raises(ValueError, match=r"x has shape \(2, 8\)"):
        removed_linear()(torch.randn(2, 8))


@pytest.mark.parametrize("ids", [torch.tensor(3), torch.arange(5), torch.zeros(2, 3, dtype=torch.long)])
def test_an_embedding_is_zero_in_all_its_uses(ids):
    layer = removed_embedding()
    head = TiedHead(layer, nn.Parameter(torch.randn(57)))
    x = torch.randn(2, 3, 11)
    assert torch.equal(layer(ids), torch.zeros(*ids.shape, 11))
    assert torch.equal(TiedEmbedding(layer)(ids), torch.zeros(*ids.shape, 11))
    assert torch.equal(layer(x, project=True), torch.zeros(2, 3, 57))
    assert torch.equal(head(x), head.bias.expand(2, 3, 57))
    head(x).sum().backward()
    assert head.bias.grad.tolist() == [6.0] * 57


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_under_autocast_are_those_of_live_layers(dtype):
    x, hidden, ids = torch.randn(2, 7), torch.randn(2, 11), torch.arange(3)
    linears, embeddings = (TTLinear(7, 30), removed_linear()), (TTMEmbedding(57, 11), removed_embedding())
    with torch.autocast("cpu", dtype=dtype):
        assert [layer(x).dtype for layer in linears] == [dtype, dtype]
        assert [layer(hidden, project=True).dtype for layer in embeddings] == [dtype, dtype]
        assert [layer(ids).dtype for layer in embeddings] == [torch.float32, torch.float32]


@pytest.mark.parametrize("layer", [removed_linear(), removed_linear(transposed=True), removed_embedding()], ids=repr)
def test_the_dense_weight_is_zero(layer):
    assert torch.equal(layer.dense(), torch.zeros(layer.weight_shape()))
    assert torch.equal(layer.weight * 1, torch.zeros(layer.weight_shape()))
    assert not layer.weight.requires_grad
    assert layer.is_removed
    assert layer.num_core_parameters == 0
    assert not any(layer.ranks)


@pytest.mark.parametrize("with_gates", [False, True])
@pytest.mark.parametrize("make", [removed_linear, removed_embedding])
def test_nothing_else_breaks(make, with_gates, tmp_path):
    layer = make()
    if with_gates:
        layer.add_rank_gates()
        assert not any(gate.requires_grad for gate in layer.rank_gates())
    layer.reset_parameters(0.02)
    twin = make()
    twin.load_state_dict(layer.state_dict())
    for copied in (twin, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).bfloat16()):
        assert copied.is_removed
        assert copied.state_dict().keys() == layer.state_dict().keys()
    layer.fold_rank_gates()
    assert layer.rank_gates() == []


@pytest.mark.parametrize("make", [removed_linear, removed_embedding])
def test_compiles_as_one_graph(make):
    torch._dynamo.reset()
    layer = make()
    x = torch.arange(5) if isinstance(layer, TTMEmbedding) else torch.randn(3, 7)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (0, "rank=0 is not a positive integer"),
        ((4, 0, 3, 2, 2), "rank=0 is not a positive integer"),
        ((0, 0), "has 2 entries, but the cores have 5 inner bonds"),
    ],
)
def test_only_zeros_for_every_bond_remove_a_layer(ranks, message):
    with pytest.raises(ValueError, match=message):
        TTLinear(7, 30, ranks=ranks)


@pytest.mark.parametrize("make", [lambda: TTLinear(8, 6, ranks=(0,) * 5), lambda: TTMEmbedding(20, 8, ranks=(0,) * 3)])
def test_no_weight_can_be_decomposed_into_no_ranks(make):
    layer = make()
    with pytest.raises(ValueError, match=r"was removed: its ranks are \(0, 0.*or make a new layer"):
        layer.load_dense(torch.randn(layer.weight_shape()))
