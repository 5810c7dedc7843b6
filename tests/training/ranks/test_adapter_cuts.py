"""hf_comera/training/ranks/adapter.py: ranks that carry nothing are cut, no others, and outputs stay."""

import torch
from torch import nn
from torch.nn import functional

from hf_comera import RankAdaptation, RankAdapter, TTMuon, add_rank_gates
from hf_comera.modules import TTLinear, TTMEmbedding


def padded(layer, extra):
    """``layer`` with ``extra`` ranks of zeros on each inner bond, behind the first one."""
    cores = []
    for place, core in enumerate(layer.cores()):
        before = extra if place > 0 else 0
        behind = extra if place < layer.num_cores - 1 else 0
        middle = [0, 0] * (core.ndim - 2)
        wider = functional.pad(core.detach(), (0, behind, *middle, 0, before))
        cores.append(wider.roll((1 if before else 0, 1 if behind else 0), (0, -1)))
    layer.load_cores(cores)
    return layer


def test_a_cut_takes_all_dead_ranks_and_changes_outputs_by_rounding_only():
    embedding = TTMEmbedding(60, 16, ranks=4, dtype=torch.float64)
    linear = TTLinear(16, 24, ranks=5, dtype=torch.float64)
    ranks = embedding.ranks, linear.ranks
    model = nn.Sequential(padded(embedding, extra=3), padded(linear, extra=2))
    add_rank_gates(model)
    adapter = RankAdapter(model, TTMuon(model), RankAdaptation(gamma=0.0, early=1, late=0), total_steps=2)
    ids = torch.arange(60)
    before = model(ids).detach()
    loss = model(ids).square().mean()
    loss.backward()
    adapter.before_step(loss)
    adapter.after_step()  # without the optimizer's own step
    assert (embedding.ranks, linear.ranks) == ranks
    torch.testing.assert_close(model(ids).detach(), before)
