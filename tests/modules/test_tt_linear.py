"""hf_comera/modules/tt_linear.py: computes what nn.Linear and Conv1D with the same dense weight compute."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from hf_comera.modules import TTLinear
from hf_comera.modules import tt_linear as tt_linear_module


@pytest.mark.parametrize(
    ("in_features", "out_features"), [(48, 96), (7, 30), (1, 5), (768, 13), (6, 50257), (30522, 2)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_nn_linear_with_its_dense_weight(in_features, out_features, bias):
    layer = TTLinear(in_features, out_features, ranks=4, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 3, in_features, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x, layer.dense(), layer.bias))
    assert layer.dense().shape == layer.weight_shape() == (out_features, in_features)


def test_a_bias_in_a_rank_to_spare_has_the_gradient_of_a_bias(monkeypatch):
    layer = TTLinear(24, 512, ranks=6, dtype=torch.float64)
    inputs = torch.randn(256, 24, dtype=torch.float64, requires_grad=True), *layer.parameters()
    y = layer(inputs[0])
    grad_y = torch.randn_like(y)
    found = y, *torch.autograd.grad(y, inputs, grad_y)
    low_rank_module = sys.modules["hf_comera.ops.low_rank"]  # as an attribute of its package it is the function
    monkeypatch.setattr(low_rank_module, "bias_as_rank", lambda code, right, bias, rank: (code, right, bias))
    with_a_bias = layer(inputs[0])
    assert "Addmm" in type(with_a_bias.grad_fn.next_functions[0][0]).__name__
    assert "Addmm" not in type(y.grad_fn.next_functions[0][0]).__name__
    torch.testing.assert_close(found, (with_a_bias, *torch.autograd.grad(with_a_bias, inputs, grad_y)))


def test_transposed_equals_conv1d():
    conv = Conv1D(96, 48)
    layer = TTLinear(48, 96, ranks=1000, transposed=True)
    layer.load_dense(conv.weight, conv.bias)
    x = torch.randn(5, 48)
    torch.testing.assert_close(layer(x), conv(x))
    assert layer.weight_shape() == tuple(conv.weight.shape)


def test_default_shape_is_the_published_one():
    layer = TTLinear(768, 3072)
    assert (layer.in_factors, layer.out_factors) == ((12, 8, 8), (12, 16, 16))
    assert layer.ranks == (12, 30, 30, 30, 16)
    assert list(layer.state_dict()) == [*(f"core_{k}" for k in range(6)), "bias"]


@pytest.mark.parametrize("std", [None, 0.02])
def test_reset_gives_the_deviation_of_the_dense_layer(std):
    layer = TTLinear(96, 48, ranks=8)
    layer.reset_parameters(std)
    expected = std or nn.Linear(96, 48).weight.std().item()
    assert layer.dense().std().item() == pytest.approx(expected, rel=0.05)
    assert not layer.bias.any()


def test_deepcopy_pickle_and_meta():
    layer = TTLinear(48, 96, ranks=4)
    x = torch.randn(3, 48)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
    assert TTLinear(48, 96, device="meta").core_0.is_meta


def test_compiles_as_one_graph_and_recompiles_once_for_other_ranks():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer = TTLinear(48, 96, ranks=6)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(3, 48)
    torch.testing.assert_close(compiled(x), layer(x))
    layer.load_cores(TTLinear(48, 96, ranks=3).cores())
    torch.testing.assert_close(compiled(x), layer(x))
    assert len(graphs) == 2


def test_compiled_gradients_equal_those_of_eager():
    torch._dynamo.reset()
    layer = TTLinear(48, 96, ranks=6, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 48, dtype=torch.float64, requires_grad=True)
    grads = [torch.autograd.grad(module(x).pow(2).sum(), [x, *layer.parameters()]) for module in (compiled, layer)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: TTLinear(48, 96, in_factors=(4, 8)),
            r"in_factors=\(4, 8\) multiply to 32, but the layer has size 48",
        ),
        (lambda: TTLinear(48, 96, out_factors=(4, 0)), "contains 0"),
        (lambda: TTLinear(48, 96, ranks=0), "rank=0 is not a positive integer"),
        (lambda: TTLinear(48, 96, ranks=(1, 2)), "has 2 entries, but the cores have 5 inner bonds"),
        (lambda: TTLinear(48, 96)(torch.randn(2, 47)), r"x has shape \(2, 47\).*in_features=48"),
        (lambda: TTLinear(48, 96).load_dense(torch.randn(48, 96)), r"weight has shape \(48, 96\).*\(96, 48\)"),
        (lambda: TTLinear(48, 96).load_cores([]), "do not fit a layer whose cores"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("std", [0.01, 0.2])
def test_outputs_start_with_the_deviation_of_a_dense_layer(std):
    torch.manual_seed(0)
    layer = TTLinear(64, 96, ranks=16)
    layer.reset_parameters(std)
    deviation = layer(torch.randn(4000, 64)).std().item()
    assert deviation == pytest.approx(std * 64**0.5, rel=0.1)


PATHS = [  # (in_features, out_features, ranks, whether the layer is dense)
    pytest.param(768, 768, 30, False, id="low-rank"),
    pytest.param(48, 48, 48, True, id="full-rank"),
    pytest.param(47, 29, (4, 16, 28, 16, 4), True, id="odd-sizes"),
]


def compiled(layer, x):
    return torch.compile(layer, fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("call", [TTLinear.__call__, compiled])
@pytest.mark.parametrize(("in_features", "out_features", "ranks", "is_dense"), PATHS)
def test_the_dense_path_is_taken_at_high_ranks_and_computes_the_same(
    in_features, out_features, ranks, is_dense, call, monkeypatch
):
    layer, rows = TTLinear(in_features, out_features, ranks=ranks), 64
    taken, original = [], tt_linear_module.dense_linear
    monkeypatch.setattr(tt_linear_module, "dense_linear", lambda *args: taken.append(1) or original(*args))
    x = torch.randn(rows, in_features, requires_grad=True)
    assert layer.prefers_dense == is_dense
    y, expected = call(layer, x), nn.functional.linear(x, layer.dense(), layer.bias)
    assert len(taken) == is_dense
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
            layer.core_0.mul_(2)
            expected = nn.functional.linear(x, layer.dense(), layer.bias)
        layer.core_0.mul_(0.25)
    y, expected = layer(x), nn.functional.linear(x, layer.dense(), layer.bias)
    tensors = [x, *layer.parameters()]
    grad = torch.randn_like(y) / rows
    torch.testing.assert_close(
        torch.autograd.grad(y, tensors, grad), torch.autograd.grad(expected, tensors, grad), rtol=1e-3, atol=1e-4
    )


def test_the_dense_matrix_is_kept_in_evaluation_until_a_core_changes():
    layer, x = TTLinear(48, 48, ranks=48), torch.randn(1, 48)
    with torch.no_grad():
        layer(x)
        matrix = layer.halves_cache.dense_matrix(layer, torch.float32)
        layer(x)
        assert layer.halves_cache.dense_matrix(layer, torch.float32) is matrix
        layer.core_0.mul_(2)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, 2 * matrix, layer.bias))


def test_the_path_is_chosen_anew_for_other_ranks():
    layer = TTLinear(48, 48, ranks=48)
    assert layer.prefers_dense
    layer.load_cores([core.detach() for core in TTLinear(48, 48, ranks=2).cores()])
    assert not layer.prefers_dense
