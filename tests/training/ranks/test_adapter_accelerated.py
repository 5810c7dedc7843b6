"""hf_comera/training/ranks/adapter.py: gradients of fp16 losses are seen as they are, however Accelerate is used."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from hf_comera import RankAdaptation, RankAdapter, TTMuon, add_rank_gates
from hf_comera.modules import TTLinear
from hf_comera.training.ranks.adapter import only_gathers, unscale, was_skipped


@pytest.fixture
def scaled():
    """A layer, its optimizer with a scaler of 2 ** 16, and how to make gradients of a scaled loss."""
    Accelerator(cpu=True)
    torch.manual_seed(0)
    layer = TTLinear(24, 24, ranks=6)
    add_rank_gates(layer)
    optimizer = AcceleratedOptimizer(TTMuon(layer, 1e-3), scaler=torch.amp.GradScaler("cpu"))
    x = torch.randn(8, 24)

    def backward(scale=True):
        loss = layer(x).square().mean()
        (optimizer.scaler.scale(loss) if scale else loss).backward()
        return loss

    return layer, optimizer, backward


@pytest.mark.parametrize("clipped", [False, True])
def test_effects_are_of_gradients_without_the_scale(scaled, clipped):
    layer, optimizer, backward = scaled
    found = []
    for scale in (True, False):
        adapter = RankAdapter(layer, optimizer, RankAdaptation(), total_steps=9)
        layer.zero_grad()
        loss = backward(scale)
        if clipped and scale:
            optimizer.scaler.unscale_(optimizer.optimizer)
        if not scale:
            optimizer.scaler = None
        adapter.before_step(loss)
        found.append(adapter.effects.clone())
    torch.testing.assert_close(*found)


def test_other_optimizers_do_nothing_unusual():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    unscale(optimizer)
    assert not only_gathers(optimizer)
    assert not was_skipped(optimizer)
