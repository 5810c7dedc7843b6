"""Healing under a time: the Trainer of a run, how many steps its minutes hold, and the minutes that were used."""

import copy
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer_callback import ExportableState

from compress.settings import Settings
from compress.texts import Texts
from hf_comera import HealingArguments, HealingTrainer
from loop.callbacks import Progress, StepCosts

TRIAL_STEPS, UNTIMED_STEPS = 10, 3
"""Steps by which the seconds of a step are found, and those of them that only warm up."""
MEASUREMENTS = 10
"""On the way, if no interval is named."""


class MinutesUsed(TrainerCallback, ExportableState):
    """Ends the training when its minutes are used; those before an interruption count.

    Args:
        minutes: That it may take; None: as many as its steps need.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes, self.seconds, self._since = minutes, 0.0, 0.0

    def state(self) -> dict[str, Any]:
        """The entry in ``trainer_state.json``."""
        self._count()
        return {"args": {"minutes": self.minutes}, "attributes": {"seconds": self.seconds}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Go on from a checkpoint."""
        self.seconds = state.stateful_callbacks[type(self).__name__]["attributes"]["seconds"]
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Stop if no time is left."""
        self._count()
        if self.minutes is not None and self.seconds >= 60 * self.minutes:
            control.should_training_stop = control.should_evaluate = control.should_log = True

    def _count(self) -> None:
        before, self._since = self._since, time.perf_counter()
        self.seconds += self._since - before if before else 0.0


class HideTokens(DataCollatorForLanguageModeling):
    """Batches for masked language models; which tokens are hidden depends on nothing but those of the batch.

    So measurements compare, and a resumed run hides what an uninterrupted one does.
    """

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """The batch."""
        words = b"".join(np.asarray(example["input_ids"], dtype=np.int32).tobytes() for example in examples)
        self.generator = torch.Generator().manual_seed(zlib.crc32(words))
        return super().torch_call(examples)


def collator_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> DataCollatorWithPadding | HideTokens:
    """What makes batches of texts for a model.

    Raises:
        ValueError: If the model is a masked language model, and its tokenizer has no token to hide others.
    """
    if not type(model).__name__.endswith("ForMaskedLM"):
        return DataCollatorWithPadding(tokenizer)
    if tokenizer.mask_token is None:
        raise ValueError(
            f"{type(model).__name__} learns from hidden tokens, but its tokenizer has no mask_token. Add it to "
            'tokenizer_config.json, for example "[MASK]".'
        )
    return HideTokens(tokenizer)


def make_trainer(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    settings: Settings,
    *,
    steps: int,
    callbacks: Sequence[TrainerCallback] = (),
    keeps: bool = True,
) -> HealingTrainer:
    """A Trainer that heals ``student`` in so many steps.

    Args:
        student: Compressed.
        teacher: Dense.
        tokenizer: Of both.
        texts: To train on, and to measure on.
        settings: Of the run.
        steps: Of the whole run.
        callbacks: Beside those of every Trainer.
        keeps: Whether it measures on the way, and writes checkpoints.
    """
    every = settings.eval_steps or max(1, steps // MEASUREMENTS)
    args = HealingArguments(
        output_dir=settings.output_dir,
        max_steps=steps,
        learning_rate=settings.learning_rate,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        per_device_eval_batch_size=settings.per_device_train_batch_size,
        max_length=settings.max_length,
        pooling=settings.pooling,
        eval_strategy="steps" if keeps else "no",
        eval_steps=every,
        save_strategy="steps" if keeps else "no",
        save_steps=every,
        save_total_limit=2,
        logging_steps=settings.logging_steps,
        seed=settings.seed,
        use_cpu=settings.use_cpu,
        report_to=[],
        dataloader_pin_memory=PartialState().device.type == "cuda",
    )
    args._n_gpu = min(args.n_gpu, 1)  # a process has one device, as with Accelerate
    trainer = HealingTrainer(
        model=student, teacher=teacher, args=args, train_dataset=texts.train or None, eval_dataset=texts.held_out,
        processing_class=tokenizer, data_collator=collator_of(student, tokenizer), callbacks=list(callbacks),
    )  # fmt: skip
    trainer.remove_callback(ProgressCallback)
    if keeps:
        trainer.add_callback(Progress)
    return trainer


def count_steps(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    settings: Settings,
) -> int:
    """Steps of the healing: as many as asked for, or as its minutes hold, by the time of a few on a copy."""
    if settings.max_steps is not None:
        return settings.max_steps
    costs = StepCosts()
    set_seed(settings.seed)
    trial = make_trainer(
        copy.deepcopy(student), teacher, tokenizer, texts, settings, steps=TRIAL_STEPS, callbacks=[costs], keeps=False
    )
    trial.train()
    timed = costs.seconds[UNTIMED_STEPS:]
    start = time.perf_counter()
    trial.evaluate()
    measurements = MEASUREMENTS * (time.perf_counter() - start)
    seconds = max(60 * settings.minutes - measurements, 30 * settings.minutes)  # at its end the run is stopped
    return max(1, int(seconds / (sum(timed) / len(timed))))


def steps_of(checkpoint: Path) -> int:
    """Steps of the whole run that a checkpoint is of; its minutes held so many on the machine that it began on."""
    return TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).max_steps
