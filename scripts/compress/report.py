"""What became of a model: dense, decomposed and healed, each as stored; a table, a picture, a card and JSON."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.healing import make_trainer
from compress.model import storage_of
from compress.settings import Settings
from compress.texts import Texts, describe_texts
from hf_comera import ComeraConfig, get_comera_model, write_model_card
from loop.measure import machine, time_interleaved
from loop.outcome import describe_machine, write_whole

BATCHES = (1, 32)
RESULTS, PICTURE = "results.json", "quality.png"
COSINE = "embedding_loss"


@dataclass(kw_only=True)
class Candidate:
    """One form of the model."""

    name: str
    parameters: int
    num_bytes: int
    """Of the files of its weights."""
    losses: dict[str, float]
    """On the held-out texts, against the dense model."""
    answers: dict[int, float] = field(default_factory=dict)
    """Texts a second, by the size of the batch."""

    @property
    def cosine(self) -> float | None:
        """Mean cosine of its embeddings with those of the dense model; None where there are none."""
        return 1 - self.losses[COSINE] if COSINE in self.losses else None

    def as_dict(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        return {**dataclasses.asdict(self), "cosine": self.cosine}


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that was measured in one run."""

    candidates: list[Candidate]
    course: list[tuple[int, float]]
    """Steps of the healing, and the held-out loss after them."""
    steps: int
    minutes: float
    num_texts: tuple[int, int]
    """For training, and held out."""


class Judge:
    """Measures models against the dense one on the held-out texts.

    Args:
        dense: The teacher.
        tokenizer: Of all.
        texts: With those held out.
        settings: Of the run.
        load: From a folder to a model, as a user does it.
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        texts: Texts,
        settings: Settings,
        load: Callable[[Path], PreTrainedModel],
    ) -> None:
        self.dense, self.tokenizer, self.settings, self.load = dense, tokenizer, settings, load
        self.texts = dataclasses.replace(texts, train=[])

    def of_dense(self, bytes_per_parameter: int) -> Candidate:
        """The dense model, which is its own measure."""
        count = sum(parameter.numel() for parameter in self.dense.parameters())
        losses = dict.fromkeys(self._losses(copy.deepcopy(self.dense)), 0.0)
        return Candidate(name="dense", parameters=count, num_bytes=count * bytes_per_parameter, losses=losses)

    def of_stored_dense(self) -> Candidate:
        """The dense model in the storage of the run: what is gained without any decomposition."""
        storage = storage_of(self.settings)
        model = get_comera_model(copy.deepcopy(self.dense), ComeraConfig(target_modules=[], storage=storage))
        return self.of_model(f"dense, {storage}", model)

    def of_model(self, name: str, model: PreTrainedModel) -> Candidate:
        """A compressed model, saved and loaded again."""
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return self.of_folder(name, Path(folder))

    def of_folder(self, name: str, folder: Path) -> Candidate:
        """A checkpoint."""
        model = self.load(folder)
        return Candidate(
            name=name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            num_bytes=checkpoint_bytes(folder),
            losses=self._losses(model),
        )

    def time(self, models: dict[str, PreTrainedModel]) -> dict[str, dict[int, float]]:
        """Texts a second of each model, by the size of the batch; all take turns."""
        chosen = sorted(self.texts.held_out, key=len)
        runs = {}
        for size in BATCHES:
            middle = max(0, len(chosen) // 2 - size // 2)
            texts = (chosen[middle : middle + size] * size)[:size]
            batch = self.tokenizer(
                texts, padding=True, truncation=True, max_length=self.settings.max_length, return_tensors="pt"
            ).to(self.dense.device)
            for name, model in models.items():
                runs[f"{name}, {size}"] = self._run(model.eval(), dict(batch))
        timings = time_interleaved(runs, self.settings.speed_rounds, label="answers")
        return {name: {size: size / timings.median(f"{name}, {size}") for size in BATCHES} for name in models}

    def _run(self, model: PreTrainedModel, batch: dict[str, Any]) -> Callable[[], None]:
        def answer() -> None:
            with torch.inference_mode():
                model(**batch)
            if model.device.type == "cuda":
                torch.cuda.synchronize()

        return answer

    def _losses(self, model: PreTrainedModel) -> dict[str, float]:
        trainer = make_trainer(model, self.dense, self.tokenizer, self.texts, self.settings, steps=1, keeps=False)
        measured = trainer.evaluate()
        return {name.removeprefix("eval_"): value for name, value in measured.items() if name.endswith("_loss")}


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of the files of weights in ``folder``."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def print_report(report: Report, console: Console) -> None:
    """Print the candidates, one a row."""
    has_cosine = report.candidates[0].cosine is not None
    timed = [size for size in BATCHES if size in report.candidates[0].answers]
    title = f"On {report.num_texts[1]:,} held-out texts, after {report.steps:,} steps in {report.minutes:.1f} minutes"
    table = Table("", title=title, title_justify="left")
    headings = ["parameters", "smaller", "MB stored", "smaller", "held-out loss"]
    headings += ["cosine to dense"] if has_cosine else []
    for heading in (*headings, *(f"texts/s, batch {size}" for size in timed)):
        table.add_column(heading, justify="right")
    dense = report.candidates[0]
    for one in report.candidates:
        cells = [
            one.name, f"{one.parameters:,}", f"{dense.parameters / one.parameters:.1f}x", f"{one.num_bytes / 1e6:.2f}",
            f"{dense.num_bytes / one.num_bytes:.1f}x", f"{one.losses['loss']:.4f}",
        ]  # fmt: skip
        cells += [f"{one.cosine:.4f}"] if has_cosine else []
        table.add_row(*cells, *(f"{one.answers[size]:,.1f}" if one.answers else "" for size in timed))
    console.print(table)


def write_report(report: Report, model: PreTrainedModel, settings: Settings, command: str, console: Console) -> None:
    """Write the card, the picture and, last, the figures."""
    folder = Path(settings.output_dir)
    on = f"{report.num_texts[1]:,} held-out texts of {describe_texts(settings.texts)}"
    last = report.candidates[-1]
    metrics: list[dict[str, Any]] = [{"name": "loss against the dense model", "value": last.losses["loss"]}]
    if last.cosine is not None:
        metrics.append({"name": "cosine of its embeddings with the dense model's", "value": last.cosine})
    if last.answers:
        dense = report.candidates[0].answers
        metrics += [
            {"name": f"answers a second at batch {size}, times those of the dense model", "value": value / dense[size],
             "measured_on": machine()["processor"]}
            for size, value in last.answers.items()
        ]  # fmt: skip
    write_model_card(
        model, folder, base_model=settings.model,
        training_data=f"{report.num_texts[0]:,} texts of {describe_texts(settings.texts)}, without labels.",
        metrics=[{"measured_on": on, **metric} for metric in metrics], training_command=command,
    )  # fmt: skip
    if not draw(report, folder / PICTURE):
        console.print('No picture of the quality: matplotlib is not installed. pip install "hf_comera[plots]"')
    figures = {
        "candidates": [one.as_dict() for one in report.candidates],
        "held_out_losses": report.course, "steps": report.steps, "minutes": report.minutes,
        "texts": report.num_texts, "settings": settings.as_dict(), "machine": describe_machine(), "command": command,
    }  # fmt: skip
    write_whole(figures, folder / RESULTS)


def draw(report: Report, path: Path) -> bool:
    """Draw the quality over the steps of the healing, and over the bytes of all candidates.

    Returns:
        False, with nothing drawn, where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = 2 if report.course else 1
    figure, axes = pyplot.subplots(1, panels, figsize=(5.5 * panels, 4.2), squeeze=False, layout="constrained")
    if report.course:
        axes[0][0].plot(*zip(*report.course, strict=True), marker="o", markersize=4)
        axes[0][0].set(xlabel="step of the healing", ylabel="held-out loss against the dense model")
        axes[0][0].set_ylim(bottom=0)
    for one in report.candidates:
        point = (one.num_bytes / 1e6, one.losses["loss"])
        axes[0][-1].plot(*point, "o")
        axes[0][-1].annotate(one.name, point, xytext=(6, 4), textcoords="offset points", fontsize="small")
    axes[0][-1].set(xlabel="MB of the checkpoint", ylabel="held-out loss against the dense model", xscale="log")
    axes[0][-1].margins(x=0.25)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def course(log: Sequence[dict[str, float]]) -> list[tuple[int, float]]:
    """(step, held-out loss) each time that a Trainer measured it."""
    return [
        (int(entry["step"]), entry["eval_loss"]) for entry in log if math.isfinite(entry.get("eval_loss", math.nan))
    ]
