"""Trains one model of the quality benchmark, for a number of steps, or as long as another one takes."""

import math
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import PreTrainedModel, RobertaForMaskedLM

from benchmarks.quality.grid import BYTES, FULL_RANK, SECONDS, Run
from benchmarks.quality.tasks import Batch, Task, held_out_loss, test_accuracy
from hf_comera import (
    ComeraConfig,
    TTMuon,
    comera_param_groups,
    get_comera_model,
    is_comera_model,
    plan,
    set_head_and_loss,
)
from hf_comera.modules import TensorTrainModule
from hf_comera.optim.tt_muon import COHERENCE
from loop.measure import DENSE, TENSOR_TRAIN, time_interleaved
from loop.memory import training_bytes

UPDATES = ("adamw", "muon")
WEIGHT_DECAY = 0.01
MOMENTUM = 0.9  # TTMuon's
MAX_WARMUP_STEPS = 200
NUM_POINTS, POINTS_PER_HELD_OUT = 40, 4
MAX_GRADIENT_NORM = 1.0
LAST_PART = 0.1
WARMUP_ROUNDS = 2
# Steps that only measure must not diverge, whatever the rates of the run.
MEASURING_RATES = {"lr": 1e-6, "other_lr": 1e-6}


def make_optimizers(
    update: str, model: nn.Module, compared: Sequence[nn.Parameter], *, lr: float, other_lr: float
) -> list[Optimizer]:
    """The optimizers of one run.

    Args:
        update: One of ``UPDATES``.
        model: In tensor-train form or dense.
        compared: The cores, or the dense weights that they replace.
        lr: Rate of ``compared``.
        other_lr: Rate of everything else.
    """
    if update == "adamw":
        return [torch.optim.AdamW(_split_groups(model, compared, lr=lr, other_lr=other_lr), lr=lr, fused=True)]
    if is_comera_model(model):
        return [_tensor_train_muon(model, lr=lr, other_lr=other_lr)]
    return _dense_muon(model, compared, lr=lr, other_lr=other_lr)


def rate_course(num_steps: int) -> Callable[[int], float]:
    """The share of the full rate at a step: a linear rise, then a linear fall to 0.

    >>> [round(rate_course(40)(step), 2) for step in (0, 1, 3, 4, 22, 39, 40)]
    [0.25, 0.5, 1.0, 1.0, 0.5, 0.03, 0.0]
    """
    warmup = min(MAX_WARMUP_STEPS, max(1, num_steps // 10))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (num_steps - step) / max(1, num_steps - warmup))

    return share


def _split_groups(
    model: nn.Module, compared: Sequence[nn.Parameter], *, lr: float, other_lr: float
) -> list[dict[str, object]]:
    """The library's groups, those that hold compared and other parameters in two."""
    wanted = set(map(id, compared))
    groups = []
    for group in comera_param_groups(model, lr, weight_decay=WEIGHT_DECAY):
        for rate, is_compared in ((group["lr"], True), (other_lr, False)):
            parameters = [parameter for parameter in group["params"] if (id(parameter) in wanted) is is_compared]
            if parameters:
                groups.append({"params": parameters, "lr": rate, "weight_decay": group["weight_decay"]})
    return groups


def _tensor_train_muon(model: nn.Module, *, lr: float, other_lr: float) -> Optimizer:
    optimizer = TTMuon(model, lr, weight_decay=WEIGHT_DECAY)
    for group in optimizer.param_groups:
        if group["group_name"] != "cores":
            group["lr"] = other_lr
    return optimizer


def _dense_muon(model: nn.Module, compared: Sequence[nn.Parameter], *, lr: float, other_lr: float) -> list[Optimizer]:
    """Torch's Muon for the matrices of linear layers, and AdamW for embeddings and the rest."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for weight in compared:
        if id(weight) not in tables:
            by_shape.setdefault(tuple(weight.shape), []).append(weight)
    groups = []
    for shape, weights in by_shape.items():
        rate = lr * muon_rate_scale(shape)
        # Muon decays by its rate times the decay: divided here, so that the decay is what AdamW's would be.
        groups.append({"params": weights, "lr": rate, "weight_decay": WEIGHT_DECAY * lr / rate})
    matrices = [weight for weights in by_shape.values() for weight in weights]
    others = [
        group
        for group in _split_groups(model, matrices, lr=lr, other_lr=other_lr)
        if not set(map(id, group["params"])) & set(map(id, matrices))
    ]
    muon = torch.optim.Muon(groups, lr=lr, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=other_lr, fused=True)]


def muon_rate_scale(shape: Sequence[int]) -> float:
    """Muon's rate over ``lr``, for steps of spectral norm ``lr * COHERENCE * sqrt(rows * columns)``.

    With ``match_rms_adamw`` a step of Muon has the norm ``rate * 0.2 * sqrt(max(rows, columns))``.

    >>> muon_rate_scale((64, 256)) == muon_rate_scale((256, 64)) == 16.0
    True
    """
    return COHERENCE / 0.2 * math.sqrt(min(shape))


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
        model = task.model_class(config).train()
        if task.model_class is RobertaForMaskedLM:  # of hidden tokens alone, as in the compressed model
            set_head_and_loss(model)
        return model
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


def seconds_ratio(task: Task, run: Run, rounds: int) -> float:
    """How many times longer a step of the dense baseline under AdamW takes, measured in turns on the same batches."""
    stream = task.batches(run.seed)
    batches = [stream[number] for number in range(WARMUP_ROUNDS + rounds)]
    twins = {TENSOR_TRAIN: run, DENSE: run.twin(form="dense", update="adamw")}

    def stepper(twin: Run) -> Callable[[], object]:
        trainer, numbers = Trainer(task, twin.twin(**MEASURING_RATES), steps=len(batches)), count()
        return lambda: trainer.step(batches[next(numbers)])

    steps = {name: stepper(twin) for name, twin in twins.items()}
    timings = time_interleaved(steps, rounds, warmup=WARMUP_ROUNDS, label=f"{run}: steps in turns")
    return timings.ratio(TENSOR_TRAIN, DENSE)


def steps_in_same_seconds(steps: int, ratio: float) -> int:
    """As many steps as take the time of ``steps`` steps that are ``ratio`` times slower.

    >>> steps_in_same_seconds(100, 1.5), steps_in_same_seconds(100, 0.25)
    (150, 25)
    """
    return max(1, round(steps * ratio))


def width_in_same_bytes(task: Task, run: Run) -> int:
    """The largest width at which the dense model trains within the bytes of the run's tensor-train counterpart.

    Raises:
        ValueError: If even the narrowest model needs more.
    """
    limit = bytes_to_train(task, run.twin(form="tt"), run.width)
    heads = task.build_config(run.width).num_attention_heads
    widths = range(heads, run.width + 1, heads)
    fitting = bisect_right(widths, limit, key=lambda width: bytes_to_train(task, run, width))
    if not fitting:
        raise ValueError(
            f"{run}: a dense model of width {heads}, the narrowest with {heads} heads, needs "
            f"{bytes_to_train(task, run, heads):,} bytes to train, the tensor train only {limit:,}. Use a larger "
            "--ranks or --widths, or leave --like_bytes_of out."
        )
    return widths[fitting - 1]


def describe(run: Run, ratio: float | None, model_width: int, steps: int) -> str:
    """What a budget came to, in a few words; empty for the ordinary one."""
    if run.budget == SECONDS and ratio is not None:
        return f"{steps} steps: the dense baseline's step takes {ratio:.2f} times as long"
    if run.budget == BYTES:
        return f"width {model_width} trains within the bytes of the tt twin of width {run.width}"
    return ""


def bytes_to_train(task: Task, run: Run, width: int) -> int:
    """Weights, gradients and optimizer state after one real step."""
    trainer = Trainer(task, run.twin(**MEASURING_RATES), steps=1, width=width)
    trainer.step(task.batches(run.seed)[0])
    return trainer.training_bytes
