"""hf_comera/training/ranks/adapter.py: a step takes as many operations for many layers as for few."""

import pytest
import torch

from hf_comera import RankAdaptation, RankAdapter, TTMuon, add_rank_gates
from hf_comera.modules import TTLinear
from tests.operation_count import CountComputations


def operations(num_layers, early):
    """Of a step between cuts, views left out, which are one a gate.

    An operation on a list of tensors counts once: a GPU launches few kernels for it, but a CPU loops in it.
    """
    model = torch.nn.Sequential(*(TTLinear(24, 24, ranks=6) for _ in range(num_layers)))
    add_rank_gates(model)
    settings = RankAdaptation(target_parameters=num_layers * 250, early=early, late=8, cut_every=8, beta=0.1)
    adapter = RankAdapter(model, TTMuon(model), settings, total_steps=20)
    loss = model(torch.randn(4, 24)).square().mean()
    loss.backward()
    with CountComputations() as before:
        adapter.before_step(loss)
    with CountComputations() as after:
        adapter.after_step()
    return before.total, after.total


@pytest.mark.parametrize("early", [2, 0], ids=["early", "late"])
def test_operations_do_not_grow_with_the_layers(early):
    counts = operations(2, early)
    assert all(counts)
    assert operations(6, early) == counts
