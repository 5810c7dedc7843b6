"""What a finished run of any script tells: what became of its ranks, on which machine, and all figures as JSON."""

import importlib.metadata
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.optim import Optimizer
from transformers import PreTrainedModel

from loop.measure import machine
from loop.memory import bytes_by_kind

PACKAGES = ("hf_comera", "torch", "transformers", "accelerate", "tokenizers", "datasets")
PART = 10
"""First and last steps are compared by this part of all."""
BYTES = {
    "weights": ("weights",),
    "weights, gradients, optimizer state": ("weights", "gradients", "optimizer"),
    "checkpoint of the training": ("weights", "optimizer"),
}


def training_bytes(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of weights, of their gradients, present or not, and of the optimizer's state."""
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return bytes_by_kind(model, [optimizer])._replace(gradients=gradients)._asdict()


def show_ranks(
    model: PreTrainedModel,
    optimizer: Optimizer,
    step_seconds: Sequence[float],
    first_bytes: Mapping[str, int],
    folder: Path,
    console: Console,
) -> None:
    """Print ranks, time and memory before and after, and draw the ranks with the size over the steps.

    Args:
        model: Its ranks were trained.
        optimizer: Its optimizer.
        step_seconds: Of all steps.
        first_bytes: :func:`training_bytes` after the first of them.
        folder: Where the picture goes.
        console: Where the rest goes.
    """
    report = model.rank_report()
    console.print(report)
    part = max(1, len(step_seconds) // PART)
    seconds = [statistics.median(steps) for steps in (step_seconds[:part], step_seconds[-part:])]
    table = Table("", "before", "after", title="What was saved", title_justify="left")
    table.add_row("parameters", *(f"{size:,}" for size in (report.sizes[0], report.sizes[-1])))
    for what, kinds in BYTES.items():
        sums = (sum(of_kind[kind] for kind in kinds) for of_kind in (first_bytes, training_bytes(model, optimizer)))
        table.add_row(what, *(f"{num_bytes / 1e6:,.2f} MB" for num_bytes in sums))
    table.add_row("seconds a step (median)", *(f"{value:.4f}" for value in seconds))
    console.print(table)
    try:
        report.plot(folder / "ranks.png")
    except ImportError as error:
        console.print(f"No picture of the ranks: {error}")


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
