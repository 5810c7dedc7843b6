"""How much memory the state of a training takes: weights, gradients, optimizer."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer


def training_bytes(model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Bytes of weights, gradients and optimizer state, as they are at this moment."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.nbytes for tensor in (*parameters, *gradients, *states))
