"""The size objective: against formulas written out, against autograd, and without reading from the device."""

import pytest
import torch

from hf_comera import add_rank_gates
from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.training.ranks.importance import (
    BondTable,
    bond_effects,
    exact_size,
    late_weight,
    rank_importance,
    relative_push,
    relaxed_size,
    shrink,
)


@pytest.fixture
def table():
    model = torch.nn.ModuleList([TTLinear(24, 30, ranks=5), TTMEmbedding(60, 16, ranks=4), TTLinear(8, 8, ranks=3)])
    add_rank_gates(model)
    for layer in model:
        for gate in layer.rank_gates():
            gate.data.uniform_(-1, 1)
    model[0].rank_gate_2.data[1] = 0
    return BondTable.of(model)


def written_out(table, norm):
    """``sum over layers, cores of n_k |d_{k-1}| |d_k|``."""
    total = 0.0
    for layer in table.layers.values():
        norms = [1.0, *(norm(gate.double()) for gate in layer.rank_gates()), 1.0]
        for place, core in enumerate(layer.cores()):
            total = total + core.shape[1:-1].numel() * norms[place] * norms[place + 1]
    return total


def test_sizes_are_those_of_the_paper(table):
    gates = table.flat()
    relaxed = written_out(table, lambda gate: gate.abs().sum())
    torch.testing.assert_close(relaxed_size(table, gates), relaxed.detach())
    assert exact_size(table, gates) == written_out(table, lambda gate: float((gate != 0).sum()))
    assert exact_size(table, torch.ones_like(gates)) == sum(m.num_core_parameters for m in table.layers.values())


def test_the_push_is_the_derivative_with_a_mean_of_one(table):
    gates = table.flat()
    relaxed = written_out(table, lambda gate: gate.abs().sum())
    derivatives = torch.autograd.grad(relaxed, table.gates)
    live = gates != 0
    slopes = torch.cat(derivatives).abs()
    push = relative_push(table, gates)
    torch.testing.assert_close(push[live], slopes[live] / slopes[live].mean())
    assert push[live].mean() == pytest.approx(1)


def test_without_live_gates_there_is_no_push_and_no_size(table):
    gates = torch.zeros_like(table.flat())
    assert torch.equal(relative_push(table, gates), gates)
    assert relaxed_size(table, gates) == exact_size(table, gates) == 0


def test_shrinking_minimises_the_l1_norm_beside_the_distance():
    gates, amount = torch.tensor([0.5, -0.5, 0.1, -0.1, 0.0]), torch.tensor([0.2, 0.2, 0.2, 0.05, 0.2])
    grid = torch.linspace(-1, 1, 20001).unsqueeze(1)
    best = grid[(0.5 * (grid - gates).square() + amount * grid.abs()).argmin(0), 0]
    torch.testing.assert_close(shrink(gates, amount), best, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("loss", "size", "weight"),
    [
        (2.0, 150.0, 0.1),  # the loss is twice the wanted one, the size half more: the loss is the worse
        (1.2, 150.0, 1.1),
        (0.5, 90.0, 1.1),  # both are better than wanted, the loss by more
        (0.95, 50.0, 0.1),
    ],
)
def test_late_weight_follows_the_worse_objective(loss, size, weight):
    found = late_weight(torch.tensor(loss), torch.tensor(size), torch.tensor(1.0), 100.0, rho=0.1)
    assert found.item() == pytest.approx(weight)


def test_late_weight_of_a_negative_loss_still_grows_with_it():
    """Some losses, as of densities, are below zero."""
    size, wanted = torch.tensor(105.0), torch.tensor(-2.0)
    assert late_weight(torch.tensor(-1.0), size, wanted, 100.0, rho=0.1).item() == pytest.approx(0.1)
    assert late_weight(torch.tensor(-3.0), size, wanted, 100.0, rho=0.1).item() == pytest.approx(1.1)


def test_effects_are_the_derivatives_by_leaving_a_rank_out(table):
    gradients = torch.randn(table.num_gates)
    gradients[3] = torch.inf  # a step that the gradient scaler will skip
    effects = bond_effects(table, table.flat(), gradients)
    parts = zip(table.split(gradients), table.gates, strict=True)
    expected = [(g * d).square()[(g * d).isfinite()].sum() for g, d in parts]
    torch.testing.assert_close(effects.float(), torch.stack(expected).detach())


def test_importance_shares_the_effect_of_a_layer_out_by_squared_singular_values(table):
    spectra = [torch.linspace(1.0, 0.005, gate.numel(), dtype=torch.float64) for gate in table.gates]
    effects = torch.rand(len(table.gates), dtype=torch.float64)
    parts = table.split(rank_importance(table, effects, spectra, threshold=0.01))
    bonds = iter(range(len(parts)))
    for layer in table.layers.values():
        own = [next(bonds) for _ in layer.rank_gates()]
        for bond in own:
            assert parts[bond][-1] == -1  # dead
            shares = spectra[bond].square() / spectra[bond].square().sum()
            torch.testing.assert_close(parts[bond][:-1], (shares * effects[own].mean())[:-1])


def test_a_layer_of_zeros_is_dead(table):
    spectra = [torch.zeros(gate.numel(), dtype=torch.float64) for gate in table.gates]
    importance = rank_importance(table, torch.zeros(len(table.gates)), spectra, threshold=0.01)
    assert (importance == -1).all()
