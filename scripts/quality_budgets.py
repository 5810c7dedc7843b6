"""Equal seconds and equal bytes: how many steps a tensor-train run gets, and how wide a dense model may be."""

from bisect import bisect_right
from collections.abc import Callable
from itertools import count

from interleaved_timing import DENSE, TENSOR_TRAIN, time_interleaved
from quality_runs import BYTES, SECONDS, Run
from quality_task import Task
from quality_training import Trainer

WARMUP_ROUNDS = 2
# Steps that only measure must not diverge, whatever the rates of the run.
MEASURING_RATES = {"lr": 1e-6, "other_lr": 1e-6}


def seconds_ratio(task: Task, run: Run, rounds: int) -> float:
    """How many times longer a step of the dense twin under AdamW takes, measured in turns on the same batches."""
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
    """The largest width at which the dense model trains within the bytes of the run's tensor-train twin.

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
            f"{bytes_to_train(task, run, heads):,} bytes to train, the tensor-train twin only {limit:,}. Use a larger "
            "--ranks or --widths, or leave --like_bytes_of out."
        )
    return widths[fitting - 1]


def describe(run: Run, ratio: float | None, model_width: int, steps: int) -> str:
    """What a budget came to, in a few words; empty for the ordinary one."""
    if run.budget == SECONDS and ratio is not None:
        return f"{steps} steps: the dense twin's step takes {ratio:.2f} times as long"
    if run.budget == BYTES:
        return f"width {model_width} trains within the bytes of the tt twin of width {run.width}"
    return ""


def bytes_to_train(task: Task, run: Run, width: int) -> int:
    """Weights, gradients and optimizer state after one real step."""
    trainer = Trainer(task, run.twin(**MEASURING_RATES), steps=1, width=width)
    trainer.step(task.batches(run.seed)[0])
    return trainer.training_bytes
