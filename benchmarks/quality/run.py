"""Measure how well tensor-train models learn, against dense ones, on real data.

    python -m benchmarks.quality.run
    python -m benchmarks.quality.run code --lrs 1e-3 3e-3 1e-2 --seeds 0 1 2
    python -m benchmarks.quality.run bytes --forms tt --ranks 30 full --like_seconds_of dense

`--help` says what is trained, what is measured and how to read the figures. `pictures.py` beside it draws them.
"""

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.quality.grid import BYTES, SECONDS, Run, grid
from benchmarks.quality.results import Results, quality_table, run_name
from benchmarks.quality.settings import DEFAULT_EPOCHS, DEFAULT_STEPS, FILES, parse_settings
from benchmarks.quality.tasks import Task, bytes_task, code_task, nli_task
from benchmarks.quality.training import (
    Outcome,
    Trainer,
    describe,
    seconds_ratio,
    steps_in_same_seconds,
    train,
    width_in_same_bytes,
)
from loop.launch import run_script
from loop.measure import machine
from loop.memory import keep_freed_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Do all runs that have no row yet, and print the table of the task.

    Args:
        argv: Command line without the name of the program. None: that of this process.

    Raises:
        ValueError: If a setting or a file cannot be used; the message says what can.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_settings(words)
    torch.set_num_threads(arguments.threads)
    if keep_freed_memory():
        os.environ["MALLOC_KEPT"] = "1"  # begins like glibc's own variables, which name rows already
    here = machine() | {"command": command(words, arguments)}
    console = Console(soft_wrap=True)
    task = load_task(arguments)
    results = Results(Path(arguments.results_dir))
    runs = grid(arguments, task.data, num_steps(arguments, task))
    for number, run in enumerate(runs, 1):
        name = run_name({**asdict(run), **here})
        with results.claim(name) as claimed:
            if results.has(name) or not claimed:
                reason = "its row is there" if claimed else "another process is at it"
                console.print(f"{number} of {len(runs)} skipped, {reason}: {run}", highlight=False)
                continue
            row, outcome = measure(task, run, arguments.timing_rounds, f"{number}/{len(runs)} {run}")
            results.save({"run": name, **asdict(run), **row, **here}, outcome.points)
    Console(width=None if console.is_terminal else 200).print(quality_table(task.name, results.rows(task.name)))
    return 0


def load_task(arguments: argparse.Namespace) -> Task:
    """Read the data and get the task ready."""
    if arguments.task == "bytes":
        return bytes_task()
    if arguments.task == "code":
        return code_task(arguments.code_file)
    return nli_task(arguments.nli_file, arguments.tokenizer)


def num_steps(arguments: argparse.Namespace, task: Task) -> int:
    """As many as asked for, or as the epochs asked for have, or the task's default."""
    epochs = arguments.epochs or (None if task.name in DEFAULT_STEPS else DEFAULT_EPOCHS)
    if arguments.steps or epochs is None:
        return arguments.steps or DEFAULT_STEPS[task.name]
    assert task.steps_per_epoch is not None  # refused with the settings
    return max(1, round(epochs * task.steps_per_epoch))


def measure(task: Task, run: Run, timing_rounds: int, label: str) -> tuple[dict[str, object], Outcome]:
    """Find out what the budget allows, train, and give the figures of the row."""
    ratio, steps, width = None, run.steps, run.width
    if run.budget == SECONDS:
        ratio = seconds_ratio(task, run, timing_rounds)
        steps = steps_in_same_seconds(run.steps, ratio)
    if run.budget == BYTES:
        width = width_in_same_bytes(task, run)
    trainer = Trainer(task, run, steps=steps, width=width)
    label = ", ".join(filter(None, (label, describe(run, ratio, width, steps))))
    outcome = train(trainer, task.batches(run.seed), steps, label)
    row = {
        "model_width": width,
        "step_ratio": "" if ratio is None else round(ratio, 4),
        "status": outcome.status,
        "steps_done": len(outcome.steps),
        **{name: _rounded(getattr(outcome, name)) for name in ("training_loss", "held_out_loss", "accuracy")},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "compared_parameters": sum(parameter.numel() for parameter in trainer.compared),
        "training_bytes": trainer.training_bytes,
        **timings(outcome),
    }
    return row, outcome


def timings(outcome: Outcome) -> dict[str, object]:
    """Seconds in all, the median of a step, and the optimizer's share; empty if the first step diverged."""
    if not outcome.steps:
        return {"seconds": "", "step_seconds": "", "optimizer_share": ""}
    seconds = sum(step.seconds for step in outcome.steps)
    return {
        "seconds": round(seconds, 3),
        "step_seconds": round(statistics.median(step.seconds for step in outcome.steps), 6),
        "optimizer_share": round(sum(step.optimizer_seconds for step in outcome.steps) / seconds, 4),
    }


def command(words: Sequence[str], arguments: argparse.Namespace) -> str:
    """The command of this process, files without their folders: those mean nothing on other machines."""
    names = {path: Path(path).name for path in (getattr(arguments, name) for name in FILES) if path}
    split = [word.rpartition("=") for word in words]  # an option and its value may be one word
    return shlex.join(["python", "-m", "benchmarks.quality.run", *(a + b + names.get(c, c) for a, b, c in split)])


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 5)


if __name__ == "__main__":
    sys.exit(run_script(main))
