"""What a task of the quality benchmark is: data in batches, a model for any width, and a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Batch = dict[str, Tensor]


class Batches(Protocol):
    """Training batches by number, without end."""

    def __getitem__(self, number: int) -> Batch:
        """The batch of step ``number``; the same at every call."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One experiment, ready to be trained on."""

    name: str
    data: str
    """The data in a few words, without folders."""
    steps_per_epoch: int | None
    """None where batches are drawn at random places and there are no epochs."""
    model_class: type[PreTrainedModel]
    build_config: Callable[[int], PreTrainedConfig]
    """From the width to the model's configuration."""
    target_modules: list[str] | None
    """What the tensor-train form compresses; None for the library's defaults."""
    batches: Callable[[int], Batches]
    """From the seed to the training batches."""
    held_out: Sequence[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    """Mean loss over the targets of a batch."""
    num_targets: Callable[[Batch], int]
    test: Sequence[Batch] = field(default=())
    """Batches to count right answers on; empty where the task has no answers."""


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model itself computes."""
    return model(**batch).loss


@torch.no_grad()
def held_out_loss(task: Task, model: nn.Module) -> float:
    """Mean loss over all held-out targets, in evaluation mode."""
    counts = [task.num_targets(batch) for batch in task.held_out]
    model.eval()
    losses = [task.loss(model, batch).item() for batch in task.held_out]
    model.train()
    return sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)


@torch.no_grad()
def test_accuracy(task: Task, model: nn.Module) -> float | None:
    """Share of right answers on the test batches; None where the task has none."""
    if not task.test:
        return None
    model.eval()
    right = sum((model(**batch).logits.argmax(-1) == batch["labels"]).sum().item() for batch in task.test)
    model.train()
    return right / sum(len(batch["labels"]) for batch in task.test)
