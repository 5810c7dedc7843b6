"""Measures the memory of one candidate in a process of its own, where nothing else has left traces."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from transformers.utils import logging

from freed_memory import hand_back_freed_memory
from interleaved_timing import saved_for_backward
from memory_candidates import Candidate, Training
from peak_memory import peak_growth
from training_size import bytes_by_kind

__all__ = ["Memory", "measure_apart"]

STEPS = 2
IMPORTED_ONCE = ["torch", "datasets", "hf_comera"]
"""By the process that the others are copies of; it takes seconds, and leaves no tensors."""


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
    way = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(way)
    if way == "forkserver":
        context.set_forkserver_preload(IMPORTED_ONCE)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, candidate, device, threads).result()


def measure(candidate: Candidate, device_name: str, threads: int) -> Memory:
    """Measure here: one step that is not counted, so that the optimizer has its state, then the others."""
    hand_back_freed_memory()
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    device = torch.device(device_name)
    training = Training(candidate, device)
    training.backward()
    gradients = bytes_by_kind(training.model, []).gradients
    training.update()
    sizes = bytes_by_kind(training.model, [training.optimizer] if training.optimizer else [])
    saved = saved_for_backward(training.loss, training.model.parameters())
    growths = [peak_growth(training.step, device) for _ in range(STEPS)]
    sizes_seen = [growth.num_bytes for growth in growths if growth.num_bytes is not None]
    return Memory(
        weights=sizes.weights,
        gradients=gradients,
        optimizer=sizes.optimizer,
        saved=saved,
        growth=max(sizes_seen, default=None),
        measured_by=growths[0].measured_by,
    )
