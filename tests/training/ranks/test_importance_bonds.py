"""training/ranks/importance.py: sizes, norms and slopes of many layers equal loops over each, and autograd."""

import pytest
import torch
from torch import nn

from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.training.ranks.importance import BondTable, gated_layers


def frozen(layer):
    return layer.requires_grad_(False)


MODELS = {
    "one-linear": lambda: [TTLinear(7, 30, ranks=4)],
    "two-cores": lambda: [TTLinear(7, 5, in_factors=(7,), out_factors=(5,), ranks=3)],
    "unequal-orders": lambda: [
        TTLinear(12, 30, in_factors=(12,), out_factors=(2, 3, 5), ranks=(4, 7, 2)),
        nn.Linear(3, 3),
        TTLinear(30, 12, ranks=5, transposed=True),
        TTLinear(4, 9, in_factors=(2, 2), out_factors=(9,), ranks=1),
    ],
    "embeddings": lambda: [
        TTMEmbedding(57, 11, ranks=4),
        TTMEmbedding(30, 6, in_factors=(5, 6), out_factors=(2, 3), ranks=9),
        TTLinear(7, 30, ranks=2),
    ],
    "some-left-out": lambda: [
        TTMEmbedding(5, 7, in_factors=(5,), out_factors=(7,)),
        frozen(TTLinear(7, 30, ranks=4)),
        TTLinear(48, 10, ranks=3),
        TTLinear(7, 30, ranks=[0] * 5),
        TTMEmbedding(57, 11, ranks=2),
    ],
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def gated_model(make):
    """The model, and those of its layers whose ranks train."""
    model = nn.ModuleList(make())
    trains = [module for module in model if not isinstance(module, nn.Linear)]
    for train in trains:
        train.add_rank_gates()
    return model, [train for train in trains if train.core_0.requires_grad and train.num_cores > 1]


def size_of(layers, norms):
    """``sum of n_k * norm_{k-1} * norm_k`` in plain loops; ``norms`` bond by bond."""
    total, norms = 0, iter(norms)
    for layer in layers:
        bonds = [1, *(next(norms) for _ in range(layer.num_cores - 1)), 1]
        for place, core in enumerate(layer.cores()):
            total += core[0, ..., 0].numel() * bonds[place] * bonds[place + 1]
    return total


@every_model
def test_norms_are_sums_over_bonds(make):
    model, layers = gated_model(make)
    table = BondTable.of(model)
    values = torch.rand(table.num_gates)
    parts = iter(values.tolist())
    expected = [sum(next(parts) for _ in range(rank)) for layer in layers for rank in layer.ranks]
    norms = table.norms(values)
    torch.testing.assert_close(norms, torch.tensor([*expected, 1.0], dtype=torch.float64), rtol=1e-6, atol=0)


@every_model
def test_size_with_ranks_is_the_number_of_core_parameters(make):
    model, layers = gated_model(make)
    table = BondTable.of(model)
    size = table.size(table.norms(torch.ones(table.num_gates)))
    assert size.item() == sum(layer.num_core_parameters for layer in layers) > 0
    assert size.dtype == torch.float64


@every_model
def test_size_and_slopes_equal_loops_and_autograd(make):
    model, layers = gated_model(make)
    table = BondTable.of(model)
    norms = torch.rand(len(table.gates), dtype=torch.float64, requires_grad=True)
    expected = size_of(layers, norms)
    padded = torch.cat([norms, torch.ones(1)])
    torch.testing.assert_close(table.size(padded), expected)
    torch.testing.assert_close(table.slopes(padded), torch.autograd.grad(expected, norms)[0])


@every_model
def test_each_gate_knows_its_bond(make):
    model, layers = gated_model(make)
    table = BondTable.of(model)
    ranks = [rank for layer in layers for rank in layer.ranks]
    assert table.bond_of_gate.tolist() == [bond for bond, rank in enumerate(ranks) for _ in range(rank)]
    assert table.num_gates == sum(ranks)
    gates = [gate for layer in layers for gate in layer.rank_gates()]
    assert all(gate is other for gate, other in zip(table.gates, gates, strict=True))


@every_model
def test_flat_and_split_are_inverse(make):
    model, _ = gated_model(make)
    for parameter in model.parameters():
        parameter.data.normal_()
    table = BondTable.of(model)
    flat = table.flat()
    assert flat.dtype == torch.float32
    assert not flat.requires_grad
    assert all(torch.equal(part, gate) for part, gate in zip(table.split(flat), table.gates, strict=True))
    assert torch.equal(table.flat(table.split(2 * flat)), 2 * flat)


def test_a_large_size_is_exact():
    """Past 2 ** 24 a float32 sum would lose single parameters."""
    layer = TTLinear(4097, 4095, in_factors=(4097,), out_factors=(4095,), ranks=2101, device="meta")
    layer.add_rank_gates()
    table = BondTable.of(layer.to_empty(device="cpu"))
    assert table.size(table.norms(torch.ones(2101))).item() == (4097 + 4095) * 2101


def test_layers_are_those_whose_ranks_train():
    model, _ = gated_model(MODELS["some-left-out"])
    assert list(gated_layers(model)) == ["2", "4"]
    assert list(BondTable.of(model).layers) == ["2", "4"]
    assert list(gated_layers(nn.Sequential(TTLinear(7, 30)))) == []


def test_a_shared_layer_counts_once():
    layer = TTLinear(7, 7, ranks=2)
    layer.add_rank_gates()
    assert len(BondTable.of(nn.ModuleList([layer, layer])).gates) == 5


def test_a_model_without_gates_has_an_empty_table():
    table = BondTable.of(nn.Linear(3, 3))
    assert (table.layers, table.gates, table.num_gates) == ({}, [], 0)
