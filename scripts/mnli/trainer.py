"""``ComeraTrainer`` for pairs of sentences: their batches, what is measured, and the best model so far."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import EvalPrediction, PreTrainedModel, TrainerCallback, TrainerState

from hf_comera import ComeraTrainer
from loop.checkpoint import SETTINGS

ACCURACY, LOSS = "eval_accuracy", "eval_held_out_loss"


class PairTrainer(ComeraTrainer):
    """The Trainer of compressed models with batches that are a pure function of seed and step.

    Args:
        args: Of the Trainer.
        identity: All that decides the numbers of the run; part of each checkpoint.
        kept_folder: A folder that belongs into each checkpoint.
        kwargs: Of ComeraTrainer; ``train_dataset`` holds batches by their numbers.
    """

    def __init__(self, *args: Any, identity: dict[str, Any], kept_folder: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.identity, self.kept_folder = identity, kept_folder
        # BERT takes num_items_in_batch and passes it over: the loss is a mean, which the Trainer has to divide
        self.model_accepts_loss_kwargs = False

    def get_train_dataloader(self) -> DataLoader:
        """All batches of the run in the order of their numbers, as a single epoch that resuming can skip in."""
        return DataLoader(
            self.train_dataset,
            sampler=range(self.args.max_steps * self.args.gradient_accumulation_steps),
            collate_fn=lambda batches: batches[0],
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.device.type == "cuda",
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Also put what the run is and the best model so far into a checkpoint."""
        super().save_model(output_dir, _internal_call)
        if output_dir is not None and self.args.should_save:
            Path(output_dir, SETTINGS).write_text(json.dumps(self.identity), encoding="utf-8")
            if self.kept_folder.is_dir():
                shutil.copytree(self.kept_folder, Path(output_dir, self.kept_folder.name))


def figures(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, and mean cross-entropy in nats, over all pairs."""
    logits, labels = (torch.as_tensor(array) for array in (prediction.predictions, prediction.label_ids))
    return {
        "accuracy": (logits.argmax(-1) == labels).double().mean().item(),
        "held_out_loss": torch.nn.functional.cross_entropy(logits.double(), labels).item(),
    }


class BestModel(TrainerCallback):
    """Keeps the model with the highest accuracy; of equals that with the lower held-out loss.

    Args:
        folder: Where it is kept.
        first_choice: Steps before which no model counts: it may still be larger than wanted.
    """

    def __init__(self, folder: Path, first_choice: int = 0) -> None:
        self.folder, self.first_choice = folder, first_choice

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, model: PreTrainedModel | None = None, **_: Any
    ) -> None:
        """Keep the model of this moment if it is better than all before it."""
        if state.global_step < self.first_choice or not state.is_world_process_zero:
            return
        *before, (now, _step) = self._worth(state)
        if any(not now > other for other, _ in before):
            return
        part = self.folder.with_name(f"{self.folder.name}.part")  # an interruption leaves no half model
        shutil.rmtree(part, ignore_errors=True)
        try:
            model.save_pretrained(part)
            shutil.rmtree(self.folder, ignore_errors=True)
            part.rename(self.folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

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

    def step(self, state: TrainerState) -> int:
        """After how many steps it was kept."""
        worth = self._worth(state)
        return max(worth, key=lambda entry: entry[0])[1]

    def _worth(self, state: TrainerState) -> list[tuple[tuple[float, float], int]]:
        """How good the model was each time it was measured since it could be chosen, more is better; and the step."""
        measured = [entry for entry in state.log_history if ACCURACY in entry and entry["step"] >= self.first_choice]
        return [((entry[ACCURACY], -entry[LOSS]), entry["step"]) for entry in measured]
