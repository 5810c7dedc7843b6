"""Copies of a model and its optimizer that know sizes but hold no entries, to try out what would not fit."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["fake_copy"]


def fake_copy(
    model: nn.Module, optimizer: torch.optim.Optimizer, mode: FakeTensorMode
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``model`` and ``optimizer`` with tensors of ``mode`` in place of theirs; the optimizer's state starts empty.

    A fused optimizer becomes one that works through its parameters in turn, which needs as little memory.
    """
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = _fake(tensor, mode)
    fake_model, fake_optimizer = copy.deepcopy((model, optimizer), memo)
    for group in fake_optimizer.param_groups:
        if group.get("fused"):
            group.update(fused=False, foreach=False)
    return fake_model, fake_optimizer


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
