"""How much memory a training takes: weights, gradients, optimizer, and the peak of its steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from peak_memory import largest_growth


class TrainingBytes(NamedTuple):
    """Bytes at this moment."""

    weights: int
    gradients: int
    optimizer: int


def training_bytes(model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Bytes of weights, gradients and optimizer state, as they are at this moment."""
    return sum(bytes_by_kind(model, optimizers))


def bytes_by_kind(model: nn.Module, optimizers: Sequence[Optimizer]) -> TrainingBytes:
    """The three of :func:`training_bytes`; a tensor that two states share is counted once."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = {id(tensor): tensor for optimizer in optimizers for tensor in _tensors(optimizer.state.values())}
    return TrainingBytes(_num_bytes(parameters), _num_bytes(gradients), _num_bytes(states.values()))


def training_peak(step: Callable[[], object], model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> int | None:
    """The most memory that a training on a CPU takes: what is there between two steps, and what a step adds.

    Call it in a process of its own; the first step is not counted. None where the system does not say it of one step.
    """
    step()
    sizes = bytes_by_kind(model, optimizers)
    growth = largest_growth(step, torch.device("cpu"))
    if growth.num_bytes is None or growth.measured_by != "VmHWM":
        return None
    return sizes.weights + sizes.optimizer + growth.num_bytes


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the values of a state, and in objects that are part of it, such as the projections of GaLore."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif hasattr(value, "__dict__"):
            yield from _tensors(vars(value).values())


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
