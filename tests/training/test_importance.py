"""hf_comera/training/importance.py, through the adapter: layers that the loss depends on keep their ranks."""

import copy

import torch

from hf_comera import RankAdaptation, RankAdapter, TTMuon, add_rank_gates
from hf_comera.modules import TTLinear

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
    adapter = RankAdapter(pair, optimizer, settings, total_steps=STEPS)
    for _ in range(STEPS):
        x, y = torch.randn(16, 24), torch.randn(16, 24)
        loss = sum((weight * layer(x) - y).square().mean() for weight, layer in zip(weights, pair, strict=True))
        loss.backward()
        adapter.before_step(loss)
        optimizer.step()
        adapter.after_step()
        optimizer.zero_grad()
    adapter.finish()
    return [layer.ranks for layer in pair]


def test_ranks_leave_the_layer_on_which_the_loss_depends_little():
    strong, weak = ranks_left([1.0, 1e-3])
    assert sum(strong) > 1.5 * sum(weak)
    assert ranks_left([1e-3, 1.0]) == [weak, strong]
