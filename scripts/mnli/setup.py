"""From settings to what a run on pairs of sentences takes: data as tokens, and the arguments of its Trainer."""

from dataclasses import dataclass

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from transformers import BertConfig, PreTrainedTokenizerBase, TrainingArguments

from loop.checkpoint import fingerprint
from loop.setup import count_steps, count_warmup
from mnli.data import NliData, PairBatches, Pairs, encode_pairs, load_pairs
from mnli.model import build_config, load_tokenizer
from mnli.settings import Settings, TrainingSettings

MULTIPLE = 8  # tokens; tensor cores want it


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run as tokens."""

    parts: NliData
    tokenizer: PreTrainedTokenizerBase
    config: BertConfig
    batches: PairBatches
    held_out: Dataset
    """What is measured while training; as many validation pairs as the settings ask for."""
    measured: dict[str, Dataset]
    """What the best model is measured on: all pairs of validation, and of each test."""
    fingerprint: str

    def steps_per_epoch(self, accumulated: int) -> float:
        """Steps it takes to see all training pairs once."""
        return self.batches.batches_per_epoch / accumulated


def prepare_data(settings: Settings) -> Data:
    """Gather the pairs and turn them into batches."""
    state, max_length = PartialState(), settings.data.max_length
    tokenizer = load_tokenizer(settings.model.tokenizer_name)
    config = build_config(settings.model.config_overrides, tokenizer, max_length)
    with state.main_process_first():  # the others find what it downloaded and converted in the cache
        parts = load_pairs(settings.data)
        named = {"train": parts.train, "validation": parts.validation, **parts.tests}
        rows = {name: encode_pairs(split, tokenizer, max_length) for name, split in named.items()}
    pairs = {name: Pairs(split, tokenizer.pad_token_id, MULTIPLE) for name, split in rows.items()}
    batches = PairBatches(
        pairs["train"], batch_size=settings.training.per_device_train_batch_size, seed=settings.training.seed,
        process=(state.process_index, state.num_processes),
    )  # fmt: skip
    return Data(
        parts=parts, tokenizer=tokenizer, config=config, batches=batches,
        held_out=rows["validation"].select(pairs["validation"].spread(settings.data.max_eval_samples)),
        measured={name: rows[name].select(pairs[name].spread()) for name in ("validation", *parts.tests)},
        fingerprint=fingerprint([array for name in ("train", "validation") for array in _contents(rows[name])]),
    )  # fmt: skip


def training_arguments(training: TrainingSettings) -> TrainingArguments:
    """The settings in the words of the Trainer, whose number of steps follows from the data."""
    args = TrainingArguments(
        output_dir=training.output_dir,
        run_name="train_mnli",
        per_device_train_batch_size=training.per_device_train_batch_size,
        per_device_eval_batch_size=training.per_device_eval_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        lr_scheduler_type=training.lr_scheduler_type,
        eval_strategy="steps",
        eval_steps=training.eval_steps or 1,
        eval_on_start=training.resume_from_checkpoint is None,
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # it waits for the device in every step
        save_strategy="no" if training.checkpointing_steps is None else "steps",
        save_steps=training.checkpointing_steps or 1,
        save_total_limit=training.save_total_limit,
        seed=training.seed,
        bf16=training.mixed_precision == "bf16",
        fp16=training.mixed_precision == "fp16",
        use_cpu=training.use_cpu,
        dataloader_num_workers=training.dataloader_num_workers,
        report_to=training.report_to if training.with_tracking else "none",
    )
    args._n_gpu = min(args.n_gpu, 1)  # a process has one device, as with Accelerate
    return args


def lay_out_steps(args: TrainingArguments, training: TrainingSettings, data: Data) -> None:
    """Set the numbers of steps that follow from the data."""
    args.max_steps = count_steps(training, data.batches.batches_per_epoch, default=0)
    args.warmup_steps = count_warmup(training, args.max_steps)
    args.eval_steps = training.eval_steps or max(1, round(data.steps_per_epoch(training.gradient_accumulation_steps)))


def _contents(rows: Dataset) -> list[np.ndarray]:
    """Everything the model sees of ``rows``."""
    table = rows.with_format("arrow")[:]
    ids = [chunk.flatten().to_numpy() for chunk in table["input_ids"].chunks]
    return [*ids, np.asarray(table["labels"].to_numpy())]
