"""hf_comera/training/ranks/importance.py, through the adapter: layers that the loss depends on keep their ranks."""

import copy

import pytest
import torch

from hf_comera import RankAdaptation, TTMuon, add_rank_gates
from hf_comera.modules import TTLinear
from tests.training.rank_training import train_ranks

STEPS = 12


def ranks_left(weights):
    """Ranks of two layers that begin equal, after training; outputs count in the loss by their weights."""
    torch.manual_seed(0)
    layer = TTLinear(24, 24, ranks=8, bias=False)
    pair = torch.nn.ModuleList([layer, copy.deepcopy(layer)])
    add_rank_gates(pair)
    optimizer = TTMuon(pair, 1e-3)
    wanted = int(0.6 * 2 * layer.num_core_parameters)
    settings = RankAdaptation(target_parameters=wanted, early=4, late=8, cut_every=2)

    def new_loss():
        x, y = torch.randn(16, 24), torch.randn(16, 24)
        return sum((weight * layer(x) - y).square().mean() for weight, layer in zip(weights, pair, strict=True))

    train_ranks(pair, optimizer, settings, STEPS, new_loss)
    return [layer.ranks for layer in pair]


def test_ranks_leave_the_layer_on_which_the_loss_depends_little():
    strong, weak = ranks_left([1.0, 1e-3])
    assert sum(strong) > 1.5 * sum(weak)
    assert ranks_left([1e-3, 1.0]) == [weak, strong]


@pytest.mark.parametrize(
    ("weak", "rank"), [([9.9e-3] * 29, 29), ([1.8e-3] * 29, 1), ([2e-3] * 29, 5), ([0.5, *[1e-5] * 28], 2)]
)
def test_what_dead_ranks_are_together_is_below_the_threshold(weak, rank):
    """Many ranks, each next to nothing, are something."""
    torch.manual_seed(0)
    layer = TTLinear(64, 48, in_factors=(64,), out_factors=(48,), ranks=30, bias=False, dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(n, 30, dtype=torch.float64)).Q for n in (48, 64))
    values = torch.tensor([1.0, *weak], dtype=torch.float64)[:30]
    layer.load_dense((left[:, : len(values)] * values) @ right[:, : len(values)].T)
    before = layer.dense().detach()
    add_rank_gates(layer)
    settings = RankAdaptation(early=1, late=0, cut_every=1, gamma=0)
    train_ranks(layer, TTMuon(layer, 1e-12), settings, 1, lambda: layer(torch.randn(8, 64).double()).square().mean())
    assert layer.ranks == (rank,)
    assert (layer.dense() - before).norm() <= 1.001 * settings.threshold * before.norm()
