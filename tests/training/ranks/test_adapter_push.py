"""hf_comera/training/ranks/adapter.py: what a push does to gates and cores, in the figures of its formulas."""

import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from hf_comera import RankAdaptation, RankAdapter, TTMuon, add_rank_gates
from hf_comera.modules import TTLinear
from hf_comera.training.ranks.importance import relative_push
from tests.training.rank_training import train_ranks

RATE = 1e-3


def adapted(steps=10, optimizer=lambda layer: TTMuon(layer, RATE), **settings):
    """A layer with gates of one, its optimizer and its adapter; nothing is cut before the end."""
    layer = TTLinear(24, 24, ranks=6)
    add_rank_gates(layer)
    optimizer = optimizer(layer)
    return (
        layer,
        optimizer,
        RankAdapter(layer, optimizer, RankAdaptation(cut_every=steps, **settings), total_steps=steps),
    )


def note(adapter, loss):
    """A step in which the optimizer does nothing, and the loss is given."""
    adapter.before_step(torch.tensor(loss))
    adapter.after_step()


def mean_fall(adapter):
    return (1 - adapter.table.flat()).double().mean().item()


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (10.0, 0.25),  # ten times the wanted loss, while the size is a sixth above its budget: rho
        (2.1, 1.25),  # the loss is a twentieth above: the size is the worse, 1 + rho
        (0.2, 1.25),
    ],
)
def test_the_late_push_weighs_the_size_by_what_the_loss_leaves(loss, weight):
    size = adapted()[0].num_core_parameters
    _, _, adapter = adapted(
        target_parameters=24 + size // 2, early=0, late=10, wanted_loss=2.0, pressure=0.2, rho=0.25
    )
    note(adapter, loss)
    assert adapter.allowed_size == size // 2 + math.floor((size - size // 2) * 0.9**3)  # after one step of ten
    assert mean_fall(adapter) == pytest.approx(0.2 * weight * RATE, rel=1e-3)


def test_the_wanted_loss_is_the_smoothed_one_at_the_end_of_the_early_stage():
    _, _, adapter = adapted(target_parameters=500, early=3, late=5)
    for loss in (1.0, 2.0):
        note(adapter, loss)
        assert adapter.wanted_loss.isnan()
    note(adapter, 4.0)
    smoothed = (0.95**2 * 1 + 0.95 * 2 + 4) / (0.95**2 + 0.95 + 1)
    assert adapter.wanted_loss.item() == pytest.approx(smoothed)
    note(adapter, 8.0)
    assert adapter.wanted_loss.item() == pytest.approx(smoothed)


def test_a_given_wanted_loss_stays():
    _, _, adapter = adapted(target_parameters=500, early=3, late=5, wanted_loss=0.7)
    for loss in (1.0, 2.0, 4.0, 8.0):
        note(adapter, loss)
        assert adapter.wanted_loss.item() == 0.7


def ranks_of_a_layer_that_learns_noise(gamma, steps=60):
    torch.manual_seed(0)
    layer = TTLinear(24, 24, in_factors=(4, 6), out_factors=(6, 4), ranks=12)
    add_rank_gates(layer)
    optimizer = TTMuon(layer, 1e-4, gate_lr=0.05)
    settings = RankAdaptation(gamma=gamma, early=steps, late=0, cut_every=20)

    def new_loss():
        return (layer(torch.randn(16, 24)) - torch.randn(16, 24)).square().mean()

    train_ranks(layer, optimizer, settings, steps, new_loss)
    return layer.ranks


def test_what_the_loss_does_not_need_dies_of_pressure_alone():
    assert ranks_of_a_layer_that_learns_noise(gamma=0.0) == (4, 12, 4)
    assert 0 < sum(ranks_of_a_layer_that_learns_noise(gamma=0.3)) < 4 + 12 + 4


def test_gates_smaller_than_their_push_become_zero():
    layer, _, adapter = adapted(early=5, late=0, gamma=0.1)
    small = torch.tensor([1e-6, -1e-6])
    layer.rank_gate_2.data[1:3] = small
    note(adapter, 1.0)
    zeros = [gate == 0 for gate in layer.rank_gates()]
    assert zeros[2].tolist() == [False, True, True, False, False, False]
    assert sum(zero.sum().item() for zero in zeros) == 2


@pytest.mark.parametrize(
    ("stages", "factor"),
    [
        ({"early": 5, "late": 0}, 1 - 0.3 * RATE),
        ({"early": 0, "late": 10, "target_parameters": 500}, 1 - 0.3 * RATE),
        ({"early": 0, "late": 0}, 1.0),
    ],
    ids=["early", "late", "final"],
)
def test_beta_shrinks_cores_and_nothing_else(stages, factor):
    layer, _, adapter = adapted(beta=0.3, gamma=0.0, pressure=0.0, **stages)
    layer.bias.data.fill_(1)
    before = [core.detach().clone() for core in layer.cores()]
    note(adapter, 1.0)
    for core, old in zip(layer.cores(), before, strict=True):
        torch.testing.assert_close(core.detach(), old * factor, rtol=1e-6, atol=0)
    assert (adapter.table.flat() == 1).all()
    assert (layer.bias == 1).all()


def test_clipping_the_gradient_leaves_the_push_as_it_is():
    layer, optimizer, adapter = adapted(
        optimizer=lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1), early=5, late=0, gamma=0.1
    )
    push = relative_push(adapter.table, adapter.table.flat())
    loss = layer(torch.randn(8, 24)).square().sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-6)
    adapter.before_step(loss)
    optimizer.step()
    adapter.after_step()
    torch.testing.assert_close(1 - adapter.table.flat(), 0.1 * 0.1 * push, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("gradient", "skipped"), [(torch.inf, True), (0.0, False)])
def test_steps_that_a_gradient_scaler_skips_count_but_push_nothing(gradient, skipped):
    Accelerator(cpu=True)
    layer, optimizer, adapter = adapted(
        optimizer=lambda layer: AcceleratedOptimizer(TTMuon(layer, RATE), scaler=torch.amp.GradScaler("cpu")),
        early=5, late=0, gamma=0.1, beta=0.1,
    )  # fmt: skip
    before = [core.detach().clone() for core in layer.cores()]
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.scaler.scale(torch.ones(()))  # which begins its work
    adapter.before_step(torch.tensor(1.0))
    optimizer.step()
    adapter.after_step()
    assert optimizer.step_was_skipped == skipped
    assert (adapter.table.flat() == 1).all() == skipped
    assert all(torch.equal(core, old) for core, old in zip(layer.cores(), before, strict=True)) == skipped
    assert adapter.step == 1
