"""All figures of a run as JSON: what was measured, with which settings, on which machine and versions."""

import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import torch

from interleaved_timing import machine
from pretrain_report import Outcome

PACKAGES = ("hf_comera", "torch", "transformers", "accelerate", "tokenizers", "datasets", "evaluate")


def write_metrics(outcome: Outcome, folder: Path, settings: dict[str, Any]) -> Path:
    """Write ``metrics.json`` into ``folder``."""
    history, speed = outcome.history, outcome.speed
    figures = {
        "train_loss": outcome.train_loss,
        "held_out_loss": outcome.held_out_loss,
        "unigram_loss": outcome.unigram_loss,
        "held_out_targets": outcome.num_targets,
        "steps": len(history.losses),
        "training_tokens": history.num_tokens,
        "training_seconds": history.seconds,
        "training_tokens_per_s": history.tokens_per_s,
        "checkpoint_bytes": outcome.checkpoint_bytes,
        "reload_is_bit_equal": outcome.reload_is_bit_equal,
        "sizes": dataclasses.asdict(outcome.sizes) | {"ratio": outcome.sizes.ratio},
        "speed": dataclasses.asdict(speed) | {"ratio": speed.ratio} if speed else None,
        "filled_masks": [dataclasses.asdict(filled) for filled in outcome.filled],
        "held_out_losses": history.held_out,
        "losses": history.losses,
        "training_data": outcome.training_data,
        "settings": settings,
        "machine": describe_machine(),
    }
    return write_whole(figures, folder / "metrics.json")


def write_whole(figures: dict[str, Any], path: Path) -> Path:
    """Write ``figures`` as JSON, all or nothing."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return beside.replace(path)


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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from the sources, not installed
        return None
