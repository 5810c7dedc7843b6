"""Measures the memory of one candidate in a process of its own, where nothing else has left traces."""

from dataclasses import dataclass

import torch

from interleaved_timing import saved_for_backward
from memory_candidates import Candidate, Training
from own_process import in_own_process
from peak_memory import largest_growth
from training_size import bytes_by_kind

__all__ = ["Memory", "measure_apart"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes in use for one candidate."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    """By autograd, from forward to backward."""
    growth: int | None
    """The most that was in use during a step, less what was before it: the largest of a few steps."""
    measured_by: str
    """See :class:`peak_memory.Growth`."""

    @property
    def parts(self) -> dict[str, int]:
        """What a training has in memory, by kind."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.saved,
        }

    @property
    def peak(self) -> int | None:
        """Of the whole training: what is there between two steps, and what a step adds."""
        return None if self.growth is None else self.weights + self.optimizer + self.growth


def measure_apart(candidate: Candidate, device: str, threads: int) -> Memory:
    """Measure in a new process, one that has not computed anything."""
    return in_own_process(threads, measure, candidate, device)


def measure(candidate: Candidate, device_name: str) -> Memory:
    """Measure here: one step that is not counted, so that the optimizer has its state, then the others."""
    device = torch.device(device_name)
    training = Training(candidate, device)
    training.backward()
    gradients = bytes_by_kind(training.model, []).gradients
    training.update()
    sizes = bytes_by_kind(training.model, [training.optimizer] if training.optimizer else [])
    saved = saved_for_backward(training.loss, training.model.parameters())
    growth = largest_growth(training.step, device)
    return Memory(
        weights=sizes.weights,
        gradients=gradients,
        optimizer=sizes.optimizer,
        saved=saved,
        growth=growth.num_bytes,
        measured_by=growth.measured_by,
    )
