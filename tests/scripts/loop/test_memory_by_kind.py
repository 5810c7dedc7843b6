"""scripts/loop/memory.py: bytes of weights, gradients and optimizer state, each tensor once, wherever it is kept."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.harness.process import in_own_process
from hf_comera.modules import TTLinear
from loop import memory
from loop.memory import TrainingBytes, bytes_by_kind, training_bytes, training_peak

FLOAT = 4


def test_bytes_of_weights_gradients_and_state():
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert training_bytes(model, [optimizer]) == 400
    model(torch.ones(1, 10)).sum().backward()
    assert training_bytes(model, [optimizer]) == 800
    optimizer.step()
    assert bytes_by_kind(model, [optimizer]) == TrainingBytes(400, 400, 800 + FLOAT)  # and the number of steps
    assert training_bytes(model, [optimizer]) == 1600 + FLOAT


def test_state_in_objects_counts_and_shared_state_counts_once():
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    table = torch.zeros(256)
    projector = SimpleNamespace(rank=3, matrices=[torch.zeros(3, 10), torch.zeros(10, 3)])
    optimizer.state[model.weight] = {"step": 1, "table": table, "other": {"table": table}, "projector": projector}
    assert bytes_by_kind(model, [optimizer]).optimizer == (256 + 60) * FLOAT


def peak_of_a_step():
    model = nn.Linear(1000, 1000, bias=False)
    return training_peak(lambda: torch.ones(5_000_000), model)


@torch.no_grad()
def peak_of_kept_halves():
    model = TTLinear(4096, 4096, ranks=256).eval()
    return training_peak(lambda: model(torch.ones(1, 4096)), model) - sum(core.nbytes for core in model.parameters())


@pytest.mark.skipif(not memory.CLEAR_REFS.exists(), reason="needs a peak that can be reset, as on Linux")
def test_the_peak_is_what_stays_and_what_a_step_adds():
    assert in_own_process(1, peak_of_a_step) == pytest.approx((1_000_000 + 5_000_000) * FLOAT, rel=0.05)
    halves = 2 * 4096 * 256 * FLOAT
    assert halves < in_own_process(1, peak_of_kept_halves) < 3 * halves
