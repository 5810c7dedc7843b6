"""Accuracy and loss of a classifier on held-out pairs, and the best model so far, kept on disk."""

import shutil
from pathlib import Path

import evaluate
import torch
from accelerate import Accelerator
from datasets import Features, Value
from torch import nn

from loop.train import Run
from mnli.data import Pairs


class Accuracy(evaluate.Metric):
    """The share of predictions that are right.

    ``evaluate.load("accuracy")`` needs the network and scikit-learn. Kept in memory: processes that share files would
    have to be told apart, and each has all predictions anyway.
    """

    def _info(self) -> evaluate.MetricInfo:
        numbers = Value("int64")
        return evaluate.MetricInfo(
            description="The share of predictions that are right.",
            citation="",
            inputs_description="",
            features=Features({"predictions": numbers, "references": numbers}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        right = sum(guess == truth for guess, truth in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}


class HeldOutPairs:
    """Pairs that a model is measured on.

    Args:
        accelerator: Shares the pairs out among the processes.
        pairs: The pairs.
        batch_size: Pairs a process takes at a time.
        limit: Measure on so many of them, from all over. None: on all.
    """

    def __init__(self, accelerator: Accelerator, pairs: Pairs, batch_size: int, limit: int | None = None) -> None:
        numbers = pairs.spread(limit)
        self.num_pairs = len(numbers)
        loader = torch.utils.data.DataLoader(
            numbers,  # type: ignore[arg-type]
            batch_size=batch_size,
            collate_fn=lambda chosen: pairs.batch(torch.as_tensor(chosen).numpy()),
            generator=torch.Generator(),  # a loader without its own draws from the generator that dropout uses
        )
        self.loader = accelerator.prepare_data_loader(loader)

    @torch.no_grad()
    def measure(self, accelerator: Accelerator, model: nn.Module) -> dict[str, float]:
        """Mean cross-entropy in nats as ``held_out_loss``, and ``accuracy``; without dropout."""
        model = accelerator.unwrap_model(model)
        was_training = model.training
        model.eval()
        metric = Accuracy(keep_in_memory=True)
        total, count = torch.zeros((), dtype=torch.float64), 0
        for batch in self.loader:
            labels = batch.pop("labels")
            logits = model(**batch).logits.float()
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            # the last batch is filled up with pairs from the start, so that all processes have one; they go out here
            guesses, labels, losses = accelerator.gather_for_metrics((logits.argmax(-1), labels, losses))
            metric.add_batch(predictions=guesses, references=labels)
            total += losses.double().sum().cpu()
            count += len(labels)
        if count != self.num_pairs:
            raise RuntimeError(f"{count} pairs were measured instead of {self.num_pairs}.")
        model.train(was_training)
        return {"held_out_loss": total.item() / self.num_pairs, **metric.compute()}


class BestModel:
    """Keeps the model with the highest value of a held-out figure; of equals that with the lower held-out loss.

    Models from before the ranks had their final size do not count.

    Args:
        folder: Where it is kept.
        figure: Name of the figure.
    """

    def __init__(self, folder: Path, figure: str = "accuracy") -> None:
        self.folder, self.figure = folder, figure

    def consider(self, run: Run) -> None:
        """Keep the model of this moment if it is better than all before it."""
        if run.step < run.first_choice:
            return
        *before, now = self._worth(run)
        if all(now > other for other in before) and run.accelerator.is_main_process:
            part = self.folder.with_name(f"{self.folder.name}.part")  # an interruption leaves no half model
            shutil.rmtree(part, ignore_errors=True)
            try:
                run.accelerator.unwrap_model(run.model).save_pretrained(part)
                shutil.rmtree(self.folder, ignore_errors=True)
                part.rename(self.folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        run.accelerator.wait_for_everyone()

    def kept(self) -> Path:
        """The folder, from which the model can be loaded.

        Raises:
            ValueError: If somebody has removed it.
        """
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"{self.folder}, where the best model was kept, is gone: the output folder was removed while the run "
                "went on. Resume from a checkpoint, which holds that model, or start again."
            )
        return self.folder

    def step(self, run: Run) -> int:
        """After how many steps it was kept."""
        worth = self._worth(run)
        return run.history.held_out[worth.index(max(worth)) - len(worth)][0]

    def _worth(self, run: Run) -> list[tuple[float, float]]:
        """How good the model was each time it was measured since it could be chosen; more is better."""
        values = zip(run.history.figures[self.figure], run.history.held_out, strict=True)
        return [(value, -loss) for (step, value), (_, loss) in values if step >= run.first_choice]
