"""scripts/training_size.py: bytes of weights, gradients and optimizer state, each tensor once, wherever it is kept."""

from types import SimpleNamespace

import torch
from torch import nn

from training_size import TrainingBytes, bytes_by_kind, training_bytes

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
