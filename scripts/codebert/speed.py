"""Training steps of a model and of its dense baseline, timed in turns on the same batches of the same run."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn

from hf_comera import TTMuon
from loop.measure import DENSE, TENSOR_TRAIN, time_interleaved


@dataclass(frozen=True)
class SpeedComparison:
    """Medians over the steps."""

    compressed_tokens_per_s: float
    dense_tokens_per_s: float
    ratio: float
    """How many times faster the compressed model trains: the median of the ratios batch by batch."""
    num_steps: int


def compare_speed(
    compressed: nn.Module,
    dense: nn.Module,
    batches: list[dict[str, Tensor]],
    autocast: Callable[[], AbstractContextManager],
) -> SpeedComparison:
    """Train both models in turns, one step on each batch, after one round that is not counted.

    Both models are changed by it: pass copies that are no longer needed.

    Args:
        compressed: The tensor-train model.
        dense: Its uncompressed twin on the same device.
        batches: The batches to measure, and a last one to warm up with.
        autocast: Makes the context that the losses are computed in, as in training.
    """
    *measured, warmup = batches
    models = {TENSOR_TRAIN: compressed, DENSE: dense}
    steps = {name: _stepper(model, [warmup, *measured], autocast) for name, model in models.items()}
    timings = time_interleaved(steps, len(measured), warmup=1, label="dense baseline in turns")
    num_tokens = [int(batch["attention_mask"].sum()) for batch in measured]
    rates = {
        name: statistics.median(tokens / seconds for tokens, seconds in zip(num_tokens, all_seconds, strict=True))
        for name, all_seconds in timings.seconds.items()
    }
    return SpeedComparison(rates[TENSOR_TRAIN], rates[DENSE], timings.ratio(TENSOR_TRAIN, DENSE), len(measured))


def _stepper(
    model: nn.Module, batches: list[dict[str, Tensor]], autocast: Callable[[], AbstractContextManager]
) -> Callable[[], None]:
    """A function that does one training step on the next batch."""
    optimizer = TTMuon(model.train(), 1e-4)  # of the dense baseline: AdamW
    device = next(model.parameters()).device
    queue = cycle([{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches])

    def step() -> None:
        with autocast():
            loss = model(**next(queue)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step
