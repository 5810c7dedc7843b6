"""hf_comera/modules/base.py: a state dict brings its ranks and gates, in place; other factors are refused."""

import pytest
import torch
from torch import nn

from hf_comera.modules import TTLinear, TTMEmbedding

LAYERS = {
    "linear": lambda ranks: TTLinear(12, 20, ranks=ranks),
    "embedding": lambda ranks: TTMEmbedding(57, 11, in_factors=(4, 5, 3), out_factors=(2, 3, 2), ranks=ranks),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())


def some_ranks(make, first):
    """Uneven ranks, of which the first is ``first``."""
    number = make(1).num_cores - 1
    return [first, *range(2, number + 1)] if first else [0] * number


def gated(layer):
    layer.add_rank_gates()
    for gate in layer.rank_gates():
        gate.data.normal_()
    return layer


def inputs(layer):
    return torch.arange(5) if isinstance(layer, TTMEmbedding) else torch.randn(3, 12)


@every_layer
@pytest.mark.parametrize("with_gates", [False, True])
@pytest.mark.parametrize(("old", "new"), [(4, 1), (1, 3), (3, 3), (4, 0), (0, 0)])
def test_ranks_of_the_state_are_taken_on_in_place(make, with_gates, old, new):
    layer, source = make(some_ranks(make, old)), make(some_ranks(make, new))
    if with_gates:
        gated(layer), gated(source)
    before = dict(layer.named_parameters())
    model, state = nn.Sequential(layer), nn.Sequential(source).state_dict()
    assert model.load_state_dict(state).missing_keys == []
    assert layer.ranks == source.ranks
    assert layer.is_removed == (new == 0)
    assert dict(layer.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())
    assert all(p.requires_grad == (p.numel() > 0) for p in layer.parameters())
    x = inputs(layer)
    assert torch.equal(layer(x), source(x))


@every_layer
def test_gates_of_the_state_are_added(make):
    layer, source = make(some_ranks(make, 4)), gated(make(some_ranks(make, 2)))
    cores = layer.cores()
    layer.load_state_dict(source.state_dict())
    x = inputs(layer)
    assert torch.equal(layer(x), source(x))
    assert all(new is old for new, old in zip(layer.cores(), cores, strict=True))
    assert all(gate.requires_grad for gate in layer.rank_gates())


@every_layer
def test_gates_that_the_state_lacks_are_missing_keys(make):
    with pytest.raises(RuntimeError, match=r"Missing key.*rank_gate_0"):
        gated(make(2)).load_state_dict(make(2).state_dict())


@every_layer
def test_the_empty_weight_of_a_checkpoint_is_expected(make):
    layer, source = make(3), make(3)
    layer.load_state_dict({**source.state_dict(), "weight": torch.empty(0)})
    assert torch.equal(layer.core_1, source.core_1)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict({**source.state_dict(), "weight": torch.ones(2, 2)})


@every_layer
def test_a_removed_layer_comes_back_and_trains(make):
    layer, source = make(some_ranks(make, 0)), make(some_ranks(make, 3))
    layer.load_state_dict(source.state_dict())
    x = inputs(layer)
    assert torch.equal(layer(x), source(x))
    layer(x).sum().backward()
    assert all(core.grad.shape == core.shape for core in layer.cores())


@every_layer
def test_frozen_layers_stay_frozen(make):
    layer = make(some_ranks(make, 4)).requires_grad_(False)
    layer.load_state_dict(gated(make(some_ranks(make, 2))).state_dict())
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_goes_on_while_the_last_graph_lives(make, dtype):
    layer = make(4).to(dtype)
    x = inputs(layer)
    x = x.to(dtype) if x.is_floating_point() else x
    loss = layer(x).sum()
    loss.backward()
    layer.load_state_dict(make(2).state_dict())
    assert all(core.grad is None and core.dtype == dtype for core in layer.cores())
    layer(x).sum().backward()
    assert all(core.grad.shape == core.shape for core in layer.cores())
    assert loss.grad_fn is not None


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        pytest.param(TTLinear(12, 20), TTLinear(20, 12), id="linear"),
        pytest.param(TTLinear(12, 20, in_factors=(3, 4)), TTLinear(12, 20, in_factors=(4, 3)), id="order-of-factors"),
        pytest.param(TTMEmbedding(20, 6), TTMEmbedding(20, 12), id="embedding"),
        pytest.param(nn.Sequential(TTLinear(12, 20)), nn.Sequential(nn.Linear(12, 20)), id="dense"),
    ],
)
def test_other_factors_are_refused_as_torch_does(layer, source):
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        layer.load_state_dict(source.state_dict())


def test_other_biases_are_refused():
    state = TTLinear(12, 20).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        TTLinear(12, 20).load_state_dict({**state, "bias": torch.zeros(21)})


def test_optimizers_go_on_with_the_loaded_parameters():
    layer = TTLinear(12, 20, ranks=4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.load_state_dict(TTLinear(12, 20, ranks=2).state_dict())
    before = layer.dense().detach()
    layer(torch.randn(3, 12)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.dense(), before)
