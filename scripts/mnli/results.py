"""The figures of a finished run on pairs of sentences: as JSON, as a row of a csv file, and as a table to read."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, TrainingArguments

from hf_comera import SizeReport, size_report
from loop.callbacks import StepCosts
from loop.measure import MACHINE_IDENTITY, replace_rows, without_folder
from loop.outcome import describe_machine, write_whole
from loop.settings import describe_ranks
from mnli.data import describe_source
from mnli.model import describe_shapes
from mnli.settings import Settings
from mnli.setup import Data
from mnli.trainer import ACCURACY, LOSS, BestModel, PairTrainer

ROW_IDENTITY = (
    "shapes", "ranks", "config_overrides", "optimizer", "learning_rate", "weight_decay", "max_grad_norm",
    "lr_scheduler_type", "num_warmup_steps", "batch_size", "steps", "max_length", "precision", "data",
    "training_pairs", "seed",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NliOutcome:
    """All that was measured in one run."""

    accuracy: dict[str, float]
    """On all pairs of validation, and of each test."""
    loss: dict[str, float]
    num_pairs: dict[str, int]
    chosen_step: int
    """After which the best model was kept."""
    sizes: SizeReport
    shapes: str
    """Factors and ranks: dense, paper, or rank and the largest rank."""
    steps: int
    seconds: float
    """Of all steps, held-out measurements and checkpoints not counted."""
    steps_per_epoch: float
    log: list[dict[str, float]]
    """What the Trainer logged."""

    @property
    def seconds_per_step(self) -> float:
        """Mean over the run."""
        return self.seconds / self.steps

    def as_dict(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        return {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "pairs": self.num_pairs,
            "chosen_step": self.chosen_step,
            "parameters": self.sizes.parameters,
            "bytes": self.sizes.bytes,
            "dense_ratio": self.sizes.ratio,
            "tensorised_ratio": self.sizes.compressed_ratio,
            "sizes": dataclasses.asdict(self.sizes),
            "steps": self.steps,
            "steps_per_epoch": self.steps_per_epoch,
            "seconds_per_step": self.seconds_per_step,
            "seconds_per_epoch": self.seconds_per_step * self.steps_per_epoch,
            "held_out_losses": self._logged(LOSS),
            "held_out_accuracies": self._logged(ACCURACY),
            "losses": self._logged("loss"),
        }

    def _logged(self, name: str) -> list[tuple[int, float]]:
        """(step, value) each time; losses are means since the time before."""
        return [(int(entry["step"]), entry[name]) for entry in self.log if name in entry]


def measure(
    trainer: PairTrainer, model: PreTrainedModel, best: BestModel, costs: StepCosts, data: Data, settings: Settings
) -> NliOutcome:
    """Measure the best model on all validation and test pairs; every process has to take part."""
    trainer.model = trainer.model_wrapped = model
    figures = {name: trainer.predict(rows).metrics for name, rows in data.measured.items()}
    return NliOutcome(
        accuracy={name: values["test_accuracy"] for name, values in figures.items()},
        loss={name: values["test_held_out_loss"] for name, values in figures.items()},
        num_pairs={"train": len(data.parts.train)} | {name: len(rows) for name, rows in data.measured.items()},
        chosen_step=best.step(trainer.state),
        sizes=size_report(model),
        shapes=describe_shapes(settings.model, data.config),
        steps=trainer.state.global_step,
        seconds=sum(costs.seconds),
        steps_per_epoch=data.steps_per_epoch(settings.training.gradient_accumulation_steps),
        log=trainer.state.log_history,
    )


def write_results(
    outcome: NliOutcome, args: TrainingArguments, settings: Settings, notes: list[str], command: str
) -> None:
    """Write ``results.json`` into the output folder and, if that is wanted, a row into the csv file."""
    here = describe_machine()
    rest = {"data": describe_source(settings.data), "notes": notes, "settings": settings.as_dict()}
    results = {**outcome.as_dict(), **rest, "machine": here, "command": command}
    write_whole(results, Path(args.output_dir, "results.json"))
    if settings.training.results_file is None:
        return
    path = Path(settings.training.results_file)
    locks = path.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{path.name}.lock"):  # several runs may end at once
        shown = shlex.join(word if word.endswith(".py") else without_folder(word) for word in shlex.split(command))
        row = {**_row(outcome, args, settings), **_place(here), "command": shown}
        replace_rows(path, [row], [*ROW_IDENTITY, *MACHINE_IDENTITY, "gpu"])


def print_results(outcome: NliOutcome, console: Console) -> None:
    """Print accuracies, sizes and times."""
    table = Table(show_header=False, title="Results", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for name, accuracy in outcome.accuracy.items():
        table.add_row(f"accuracy on {outcome.num_pairs[name]:,} pairs of {name}", f"{accuracy:.2%}")
    sizes = outcome.sizes
    table.add_row("chosen after step", f"{outcome.chosen_step:,} of {outcome.steps:,}")
    table.add_row("parameters", f"{sizes.parameters:,}")
    if outcome.shapes != "dense":
        table.add_row("of the dense baseline", f"{sizes.dense_parameters:,}, {sizes.ratio:.1f}x as many")
        table.add_row("in the tensor-train layers alone", f"{sizes.compressed_ratio:.1f}x as many")
    table.add_row("seconds a step, an epoch", f"{outcome.seconds_per_step:.3f}, {_epoch_seconds(outcome):,.1f}")
    console.print(table)


def _row(outcome: NliOutcome, args: TrainingArguments, settings: Settings) -> dict[str, Any]:
    model, training = settings.model, settings.training
    processes, per_step = args.world_size, training.gradient_accumulation_steps
    shared = {name: value for name, value in settings.as_dict().items() if name in ROW_IDENTITY}
    identity = {
        **shared,
        "shapes": outcome.shapes,
        "ranks": describe_ranks(training),
        "optimizer": "adamw" if model.dense and training.optimizer == "tt_muon" else training.optimizer,
        "config_overrides": model.config_overrides or "",
        "num_warmup_steps": args.warmup_steps,
        "batch_size": training.per_device_train_batch_size * per_step * processes,
        "steps": outcome.steps,
        "precision": args.mixed_precision,
        "data": describe_source(settings.data),
        "training_pairs": outcome.num_pairs["train"],
    }
    return {
        **{name: identity[name] for name in ROW_IDENTITY},
        **{f"accuracy_{name}": round(value, 5) for name, value in outcome.accuracy.items()},
        "chosen_step": outcome.chosen_step,
        "parameters": outcome.sizes.parameters,
        "bytes": outcome.sizes.bytes,
        "dense_ratio": round(outcome.sizes.ratio, 2),
        "tensorised_ratio": round(outcome.sizes.compressed_ratio, 2),
        "seconds_per_step": round(outcome.seconds_per_step, 4),
        "seconds_per_epoch": round(_epoch_seconds(outcome), 2),
        "processes": processes,
    }


def _place(here: dict[str, Any]) -> dict[str, Any]:
    """The machine in columns of a row."""
    versions = here["versions"]
    plain = {name: value for name, value in here.items() if name not in {"versions", "platform"}}
    return plain | {"gpu": here["gpu"] or "", "hf_comera": versions["hf_comera"], "accelerate": versions["accelerate"]}


def _epoch_seconds(outcome: NliOutcome) -> float:
    return outcome.seconds_per_step * outcome.steps_per_epoch
