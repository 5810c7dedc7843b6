"""Trains one model of the quality benchmark and keeps what its row and its curve need."""

import math
import random
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_comera import ComeraConfig, get_comera_model, is_comera_model, plan
from hf_comera.modules import TensorTrainModule
from quality_runs import FULL_RANK, Run
from quality_task import Batch, Task, held_out_loss, test_accuracy
from quality_updates import make_optimizers, rate_course
from training_size import training_bytes

NUM_POINTS, POINTS_PER_HELD_OUT = 40, 4
MAX_GRADIENT_NORM = 1.0
LAST_PART = 0.1


@dataclass(frozen=True)
class Step:
    """Figures of one step."""

    loss: float
    seconds: float
    optimizer_seconds: float


@dataclass
class Outcome:
    """Figures of one run; losses are None where it diverged."""

    status: str = "complete"
    training_loss: float | None = None
    held_out_loss: float | None = None
    accuracy: float | None = None
    steps: list[Step] = field(default_factory=list)
    points: list[dict[str, float | int]] = field(default_factory=list)
    """The curve: step, seconds so far, mean training loss since the last point, at times the held-out loss."""


class Trainer:
    """A model with its optimizers, one step at a time.

    Args:
        task: What to learn.
        run: In which form, and how.
        steps: Length of the rate's course.
        width: Hidden size, where it is not that of the run.
    """

    def __init__(self, task: Task, run: Run, *, steps: int, width: int | None = None) -> None:
        random.seed(run.seed)
        np.random.seed(run.seed)
        torch.manual_seed(run.seed)
        self.task = task
        self.model = build_model(task, run, width or run.width)
        self.compared = compared_parameters(self.model, task)
        self.optimizers = make_optimizers(run.update, self.model, self.compared, lr=run.lr, other_lr=run.other_lr)
        self.schedules = [LambdaLR(optimizer, rate_course(steps)) for optimizer in self.optimizers]
        self.training_bytes = 0
        """Known after the first step."""

    def step(self, batch: Batch) -> Step:
        """One step.

        Raises:
            FloatingPointError: If the loss or a gradient is no longer finite.
        """
        start = time.perf_counter()
        loss = self.task.loss(self.model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            raise FloatingPointError(f"loss {loss.item()}, norm of the gradient {norm.item()}")
        middle = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        end = time.perf_counter()
        if not self.training_bytes:
            self.training_bytes = training_bytes(self.model, self.optimizers)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.zero_grad()
            schedule.step()
        return Step(loss.item(), end - start, end - middle)


def build_model(task: Task, run: Run, width: int) -> PreTrainedModel:
    """The model with random weights, in the form of the run."""
    config = task.build_config(width)
    if run.form == "dense":
        return task.model_class(config).train()
    comera_config = ComeraConfig(
        target_modules=task.target_modules,
        rank=FULL_RANK if run.rank == "full" else int(run.rank),
        num_factors=int(run.num_factors),
    )
    return get_comera_model(task.model_class, comera_config, config=config)


def compared_parameters(model: PreTrainedModel, task: Task) -> list[nn.Parameter]:
    """The cores of a compressed model; of a dense one the weights that its twin has cores for."""
    if is_comera_model(model):
        return [core for module in model.modules() if isinstance(module, TensorTrainModule) for core in module.cores()]
    layers = plan(model, ComeraConfig(target_modules=task.target_modules))
    return [model.get_submodule(layer.name).get_parameter("weight") for layer in layers]


def train(trainer: Trainer, batches: object, num_steps: int, label: str) -> Outcome:
    """Train to the end, or until the loss is no longer finite."""
    outcome = Outcome()
    points = point_steps(num_steps)
    try:
        with tqdm(total=num_steps, desc=label, unit="step", dynamic_ncols=True, mininterval=1.0) as bar:
            for number in range(num_steps):
                outcome.steps.append(trainer.step(batches[number]))
                bar.update()
                if number + 1 in points:
                    _add_point(outcome, trainer, points)
                    bar.set_postfix(_shown(outcome), refresh=False)
        _finish(outcome, trainer)
    except FloatingPointError:
        outcome.status = "diverged"
        outcome.training_loss = outcome.held_out_loss = outcome.accuracy = None
    return outcome


def point_steps(num_steps: int) -> list[int]:
    """The steps after which the curve has a point; the last one always is one.

    >>> point_steps(400)[:3], len(point_steps(400)), point_steps(3)
    ([10, 20, 30], 40, [1, 2, 3])
    """
    return sorted({math.ceil(num_steps * point / NUM_POINTS) for point in range(1, NUM_POINTS + 1)})


def _add_point(outcome: Outcome, trainer: Trainer, points: list[int]) -> None:
    step = len(outcome.steps)
    since = outcome.points[-1]["step"] if outcome.points else 0
    number = len(outcome.points) + 1
    point = {
        "point": number,
        "step": step,
        "seconds": round(sum(one.seconds for one in outcome.steps), 3),
        "training_loss": round(statistics.fmean(one.loss for one in outcome.steps[since:]), 5),
    }
    if number % POINTS_PER_HELD_OUT == 0 or step == points[-1]:
        loss = held_out_loss(trainer.task, trainer.model)
        if not math.isfinite(loss):
            raise FloatingPointError(f"held-out loss {loss}")
        point["held_out_loss"] = round(loss, 5)
    outcome.points.append(point)


def _finish(outcome: Outcome, trainer: Trainer) -> None:
    last = outcome.steps[-max(1, round(LAST_PART * len(outcome.steps))) :]
    outcome.training_loss = statistics.fmean(step.loss for step in last)
    outcome.held_out_loss = outcome.points[-1]["held_out_loss"]
    outcome.accuracy = test_accuracy(trainer.task, trainer.model)


def _shown(outcome: Outcome) -> dict[str, str]:
    held_out = [point["held_out_loss"] for point in outcome.points if "held_out_loss" in point]
    shown = {"loss": f"{outcome.points[-1]['training_loss']:.3f}"}
    return shown | ({"held-out": f"{held_out[-1]:.3f}"} if held_out else {})
