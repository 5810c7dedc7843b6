"""``ComeraTrainer`` for pairs of sentences: their batches, what is measured, and the best model so far."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import EvalPrediction, PreTrainedModel, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from hf_comera import ComeraTrainer
from loop.checkpoint import SETTINGS
from loop.interrupt import Interrupt
from loop.outcome import training_bytes
from loop.progress import beside_bar

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


class StepCosts(TrainerCallback, ExportableState):
    """Seconds of each step, held-out measurements and checkpoints not counted, and bytes after the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first_bytes: dict[str, int] = {}
        self._since, self._num_read = 0.0, 0

    def state(self) -> dict[str, Any]:
        """The entry in ``trainer_state.json``."""
        return {"args": {}, "attributes": {"seconds": self.seconds, "first_bytes": self.first_bytes}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Go on from a checkpoint."""
        vars(self).update(state.stateful_callbacks[type(self).__name__]["attributes"])
        self._num_read = len(self.seconds)
        self._lap()

    def on_step_end(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """A step is done, as far as the host knows."""
        self.seconds.append(self._lap())
        if state.global_step == 1:
            self.first_bytes = training_bytes(model, optimizer)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Losses were read, for which the device was waited for; of which of these steps is not known."""
        waited, num_steps = self._lap(), len(self.seconds) - self._num_read
        if "loss" in (logs or {}) and num_steps:
            self.seconds[-num_steps:] = [seconds + waited / num_steps for seconds in self.seconds[-num_steps:]]
            self._num_read = len(self.seconds)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """What took this time was no step."""
        self._lap()

    on_save = on_evaluate

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before


class Progress(ProgressCallback):
    """One bar over the steps, with the newest figures beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, float] = {}

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """No bar of its own: it would break up that of the steps."""

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Show the figures."""
        self.figures.update(logs or {})
        if self.training_bar is not None:
            self.training_bar.set_postfix(beside_bar(self.figures), refresh=False)


class StoppedError(Exception):
    """A run was stopped, with a checkpoint of its last step."""


class StopWhenAsked(TrainerCallback):
    """Finishes the step at hand, has a checkpoint written, and ends the training.

    Args:
        interrupt: Knows whether it is to end.

    Raises:
        StoppedError: Once the checkpoint is there.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt, self.stops = interrupt, False

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Have what was trained so far logged and saved."""
        self.stops = self.interrupt.agreed() and state.global_step < state.max_steps
        if self.stops:
            control.should_log = control.should_save = True

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Leave; by an exception, since a training that ends has its ranks cut to the wanted size."""
        if self.stops:
            raise StoppedError
