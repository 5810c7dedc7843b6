"""What the memory benchmark compares: a model in one form, with an activation policy and an optimizer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_comera import ActivationPolicy, set_activation_policy
from memory_optimizers import make_optimizer
from memory_workloads import WORKLOADS

__all__ = ["POLICIES", "Candidate", "Training"]

POLICIES: dict[str, str | ActivationPolicy] = {
    "keep": "keep",
    "rank": "rank",
    "rank, attention again": ActivationPolicy(attention="recompute"),
    "rank+fp8": "rank+fp8",
    "rank+fp8, attention kept": ActivationPolicy(storage="fp8"),
    "fp8": "fp8",
}
"""By the name that rows have."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Plain values, so that another process can be told; names are those of the columns of the rows."""

    model: str
    sequences: int
    form: str
    policy: str
    dropout: float = 0.0
    optimizer: str = ""
    """A name of ``memory_optimizers``, or none for forward and backward alone."""

    def case(self) -> dict[str, str | float]:
        """The columns that name the row."""
        return {
            "model": self.model,
            "tokens": f"{self.sequences}x{WORKLOADS[self.model].length}",
            "dropout": self.dropout,
            "form": self.form,
            "policy": self.policy,
            "optimizer": self.optimizer,
        }


class Training:
    """The model of a candidate with its batch, one step at a time.

    Args:
        candidate: What to build.
        device: Where.
        model: Used instead of a new one; its policy is set.
    """

    def __init__(self, candidate: Candidate, device: torch.device, model: PreTrainedModel | None = None) -> None:
        workload = WORKLOADS[candidate.model]
        torch.manual_seed(0)
        self.device = device
        self.model = model or workload.build(candidate.form, candidate.dropout).to(device)
        self.batch = workload.batch(candidate.sequences, device)
        self.optimizer = make_optimizer(candidate.optimizer, self.model) if candidate.optimizer else None
        self.policy = POLICIES[candidate.policy]

    def loss(self) -> Tensor:
        """Forward."""
        set_activation_policy(self.model, self.policy)  # the model may be shared
        return self.model(**self.batch).loss

    def backward(self) -> None:
        """Forward and backward."""
        self.loss().backward()

    def update(self) -> None:
        """The optimizer's step, if there is one, after which gradients are let go."""
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> None:
        """All of it."""
        self.backward()
        self.update()

    def gradient(self) -> Tensor:
        """All entries of all gradients in one row, of the same random numbers at every call."""
        torch.manual_seed(1)
        self.backward()
        gradient = _joined(self.model)
        self.model.zero_grad()
        return gradient


def _joined(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
