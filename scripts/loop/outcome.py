"""What a finished run of any script tells: what became of its ranks, on which machine, and all figures as JSON."""

import importlib.metadata
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from loop.measure import machine
from loop.memory import bytes_by_kind
from loop.train import Run

PACKAGES = ("hf_comera", "torch", "transformers", "accelerate", "tokenizers", "datasets", "evaluate")
PART = 10
"""First and last steps are compared by this part of all."""
BYTES = {
    "weights": ("weights",),
    "weights, gradients, optimizer state": ("weights", "gradients", "optimizer"),
    "checkpoint of the training": ("weights", "optimizer"),
}


def show_ranks(run: Run, console: Console) -> None:
    """Print ranks, time and memory before and after, and draw the ranks with the size over the steps.

    Nothing if ranks were not trained.
    """
    if run.adapter is None:
        return
    report = run.accelerator.unwrap_model(run.model).rank_report()
    console.print(report)
    console.print(_savings(run))
    try:
        report.plot(run.folder / "ranks.png")
    except ImportError as error:
        console.print(f"No picture of the ranks: {error}")


def _savings(run: Run) -> Table:
    """Time and memory of a step, at first and at last."""
    assert run.adapter is not None
    history, sizes = run.history, run.adapter.history.parameters
    part = max(1, run.step // PART)
    seconds = [statistics.median(steps) for steps in (history.step_seconds[:part], history.step_seconds[-part:])]
    for parameter in run.model.parameters():  # as they were when the first figure was taken
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = parameter.detach().new_zeros(parameter.shape)
    last_bytes = bytes_by_kind(run.model, [run.optimizer])._asdict()
    run.optimizer.zero_grad()
    table = Table("", "before", "after", title="What was saved", title_justify="left")
    table.add_row("parameters", *(f"{size:,}" for size in (sizes[0], sizes[-1])))
    for what, kinds in BYTES.items():
        sums = (sum(of_kind[kind] for kind in kinds) for of_kind in (history.first_bytes, last_bytes))
        table.add_row(what, *(f"{num_bytes / 1e6:,.2f} MB" for num_bytes in sums))
    table.add_row("seconds a step (median)", *(f"{value:.4f}" for value in seconds))
    return table


def describe_machine() -> dict[str, Any]:
    """Where figures are measured, when, and with what."""
    facts = machine()
    del facts["command"]  # that of this run is in the settings
    return facts | {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: _version(name) for name in PACKAGES},
    }


def write_whole(figures: dict[str, Any], path: Path) -> Path:
    """Write ``figures`` as JSON, all or nothing."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return beside.replace(path)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from the sources, not installed
        return None
