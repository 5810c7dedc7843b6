"""From settings to a run on pairs of sentences: data, tokens, model, what is measured, and the best model so far."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from accelerate import Accelerator
from datasets import Dataset
from transformers import BertConfig, PreTrainedTokenizerBase

from loop.assembly import assemble_run
from loop.checkpoint import fingerprint
from loop.train import Run
from mnli.data import NliData, PairBatches, Pairs, encode_pairs, load_pairs
from mnli.evaluation import BestModel, HeldOutPairs
from mnli.model import build_config, build_model, load_tokenizer
from mnli.settings import Settings

MULTIPLE = 8  # tokens; tensor cores want it


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run as tokens, and what is measured on it."""

    parts: NliData
    tokenizer: PreTrainedTokenizerBase
    config: BertConfig
    batches: PairBatches
    held_out: HeldOutPairs
    """What is measured while training; as many validation pairs as the settings ask for."""
    validation: HeldOutPairs
    tests: dict[str, HeldOutPairs]
    fingerprint: str

    def steps_per_epoch(self, accumulated: int) -> float:
        """Steps it takes to see all training pairs once."""
        return self.batches.batches_per_epoch / accumulated


def prepare_data(accelerator: Accelerator, settings: Settings) -> Data:
    """Gather the pairs and turn them into batches."""
    training, max_length = settings.training, settings.data.max_length
    tokenizer = load_tokenizer(settings.model.tokenizer_name)
    config = build_config(settings.model.config_overrides, tokenizer, max_length)
    with accelerator.main_process_first():  # the others find what it downloaded and converted in the cache
        parts = load_pairs(settings.data)
        named = {"train": parts.train, "validation": parts.validation, **parts.tests}
        rows = {name: encode_pairs(split, tokenizer, max_length) for name, split in named.items()}
    pairs = {name: Pairs(split, tokenizer.pad_token_id, MULTIPLE) for name, split in rows.items()}
    batches = PairBatches(
        pairs["train"], batch_size=training.per_device_train_batch_size, seed=training.seed,
        process=(accelerator.process_index, accelerator.num_processes),
    )  # fmt: skip

    def held_out(name: str, limit: int | None = None) -> HeldOutPairs:
        return HeldOutPairs(accelerator, pairs[name], training.per_device_eval_batch_size, limit)

    return Data(
        parts=parts, tokenizer=tokenizer, config=config, batches=batches,
        held_out=held_out("validation", settings.data.max_eval_samples), validation=held_out("validation"),
        tests={name: held_out(name) for name in parts.tests},
        fingerprint=fingerprint([array for name in ("train", "validation") for array in _contents(rows[name])]),
    )  # fmt: skip


def prepare_run(accelerator: Accelerator, settings: Settings, data: Data) -> Run:
    """Build model, optimizer and schedule, and keep the best model beside the checkpoints."""
    training = settings.training
    if training.eval_steps is None:
        epoch = max(1, round(data.steps_per_epoch(training.gradient_accumulation_steps)))
        settings = dataclasses.replace(settings, training=dataclasses.replace(training, eval_steps=epoch))
    run = assemble_run(
        accelerator, settings, lambda: build_model(settings.model, data.config),
        batches=data.batches, held_out=data.held_out, fingerprint=data.fingerprint,
        default_steps=0,
    )  # fmt: skip
    best = BestModel(run.folder / "best")
    run.kept_folder, run.after_measuring = best.folder, best.consider
    return run


def _contents(rows: Dataset) -> list[np.ndarray]:
    """Everything the model sees of ``rows``."""
    table = rows.with_format("arrow")[:]
    ids = [chunk.flatten().to_numpy() for chunk in table["input_ids"].chunks]
    return [*ids, np.asarray(table["labels"].to_numpy())]
