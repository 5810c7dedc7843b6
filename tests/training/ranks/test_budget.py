"""hf_comera/training/ranks/budget.py: dead ranks go first, floors hold, and the wanted size is met by the model."""

import pytest
import torch
from torch import nn

from hf_comera.compress.trimming import smallest_size
from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.training.ranks.budget import choose_ranks, layer_ranks
from hf_comera.training.ranks.importance import BondTable
from tests.compress.test_trimming import size_of


def gated_table(seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleList([TTLinear(7, 30, ranks=4), TTMEmbedding(57, 11, ranks=5), TTLinear(48, 10, ranks=3)])
    for module in model:
        module.add_rank_gates()
        for gate in module.rank_gates():
            gate.data.normal_()
    table = BondTable.of(model)
    return table, torch.rand(table.num_gates)


def kill(table, importance, *places):
    """Let the ranks ``(bond, rank)`` be dead: gates of zero, negative importance; their flat places."""
    for bond, rank in places:
        table.gates[bond].data[rank] = 0
    dead = (table.flat() == 0).nonzero().flatten()
    importance[dead] = -1
    return dead.tolist()


def sizes(table, chosen):
    trains = layer_ranks(table, torch.zeros(table.num_gates), 0)
    items = iter(chosen)
    return size_of(trains, [[next(items) for _ in train.importance] for train in trains])


def flat_kept(table, chosen):
    """Flat places of the gates that stay."""
    marks = [
        torch.zeros(gate.numel()).index_fill(0, index, 1) for gate, index in zip(table.gates, chosen, strict=True)
    ]
    return torch.cat(marks).bool()


def test_without_a_budget_exactly_the_dead_ranks_go():
    table, importance = gated_table()
    dead = kill(table, importance, (0, 1), (2, 0), (2, 3), (7, 4))
    kept = flat_kept(table, choose_ranks(table, importance, min_rank=0))
    assert (~kept).nonzero().flatten().tolist() == dead
    assert all(index.dtype == torch.int64 for index in choose_ranks(table, importance, 0))


@pytest.mark.parametrize("budget", [None, 10_000])
def test_a_layer_with_a_dead_bond_is_removed(budget):
    table, importance = gated_table()
    kill(table, importance, *((1, rank) for rank in range(4)))
    chosen = choose_ranks(table, importance, min_rank=0, budget=budget)
    assert [len(index) for index in chosen[:5]] == [0] * 5
    assert [len(index) for index in chosen[5:]] == [gate.numel() for gate in table.gates[5:]]


def test_a_floor_saves_a_layer_with_a_dead_bond():
    table, importance = gated_table()
    kill(table, importance, *((1, rank) for rank in range(4)))
    chosen = choose_ranks(table, importance, min_rank=2, budget=10_000)
    assert [len(index) for index in chosen[:5]] == [
        gate.numel() if bond != 1 else 2 for bond, gate in enumerate(table.gates[:5])
    ]


def test_embeddings_keep_a_rank_on_the_way_to_a_budget():
    table, importance = gated_table()
    floors = [train.floor for train in layer_ranks(table, importance, 0)]
    assert floors == [0, 1, 0]
    assert [train.floor for train in layer_ranks(table, importance, 3)] == [3, 3, 3]
    smallest = smallest_size(layer_ranks(table, importance, 0))
    chosen = choose_ranks(table, importance, 0, budget=smallest)
    assert [len(index) for index in chosen] == [0] * 5 + [1] * 3 + [0] * 5


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9, 1.0])
def test_dead_ranks_go_first_and_never_below_the_wanted_size(seed, part):
    table, importance = gated_table(seed)
    generator = torch.Generator().manual_seed(seed)
    for gate in table.gates:
        gate.data[torch.rand(gate.numel(), generator=generator) < 0.3] = 0
        gate.data[0] = 1
    kill(table, importance)
    zero = table.flat() == 0
    full, live = (
        sizes(table, [range(g.numel()) for g in table.gates]),
        sizes(table, choose_ranks(table, importance, 0)),
    )
    for wanted in (0, live, (live + full) // 2):
        budget = max(round(part * full), wanted)
        kept = flat_kept(table, chosen := choose_ranks(table, importance, 0, budget, wanted))
        size = sizes(table, chosen)
        assert size <= budget
        if wanted <= live <= budget:
            assert torch.equal(kept, ~zero)
        if wanted > live:
            assert size > live
            assert kept[~zero].all()
        for stays, dead in zip(table.split(kept), table.split(zero), strict=True):  # room left may go to dead ones
            assert not stays[dead].any() or stays[~dead].all()
