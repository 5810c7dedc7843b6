"""The tasks of the quality benchmark: data in batches, a model for any width, and a loss."""

import importlib
import inspect
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from datasets import Dataset, load_dataset
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from codebert.corpus import load_corpus
from codebert.masking import IGNORED, Masking, TrainingBatches, held_out_batches
from codebert.model import DEMO_LENGTH, DEMO_VOCABULARY, SMALL_ROBERTA, fit_to_tokenizer
from codebert.settings import DataSettings
from codebert.tokens import encode_corpus, sequence_lengths, train_tokenizer
from mnli.data import PairBatches, Pairs, encode_pairs

Batch = dict[str, Tensor]
MODULES = (
    "json", "argparse", "ast", "http.client", "unittest.mock", "typing", "email.message", "tarfile", "zipfile",
    "subprocess", "logging", "threading",
)  # fmt: skip
BYTES_LENGTH, BYTES_BATCH_SIZE = 96, 16
HELD_OUT_SHARE = 0.1
HELD_OUT_SEQUENCES = 192
CODE_BATCH_SIZE, CODE_HELD_OUT_BATCH_SIZE = 16, 32
HELD_OUT_FUNCTIONS = 512
HELD_OUT_SEED = 0  # the same hidden tokens for every seed of the training
NLI_LENGTH, NLI_BATCH_SIZE, NLI_MEASURING_BATCH_SIZE = 96, 64, 128
HELD_OUT_PAIRS = 1024
COLUMNS = ("premise", "hypothesis", "label", "fold")
FOLDS = ("train", "valid", "test")


class Batches(Protocol):
    """Training batches by number, without end."""

    def __getitem__(self, number: int) -> Batch:
        """The batch of step ``number``; the same at every call."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One experiment, ready to be trained on."""

    name: str
    data: str
    """The data in a few words, without folders."""
    steps_per_epoch: int | None
    """None where batches are drawn at random places and there are no epochs."""
    model_class: type[PreTrainedModel]
    build_config: Callable[[int], PreTrainedConfig]
    """From the width to the model's configuration."""
    target_modules: list[str] | None
    """What the tensor-train form compresses; None for the library's defaults."""
    batches: Callable[[int], Batches]
    """From the seed to the training batches."""
    held_out: Sequence[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    """Mean loss over the targets of a batch."""
    num_targets: Callable[[Batch], int]
    test: Sequence[Batch] = field(default=())
    """Batches to count right answers on; empty where the task has no answers."""


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model itself computes."""
    return model(**batch).loss


@torch.no_grad()
def held_out_loss(task: Task, model: nn.Module) -> float:
    """Mean loss over all held-out targets, in evaluation mode."""
    counts = [task.num_targets(batch) for batch in task.held_out]
    model.eval()
    losses = [task.loss(model, batch).item() for batch in task.held_out]
    model.train()
    return sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)


@torch.no_grad()
def test_accuracy(task: Task, model: nn.Module) -> float | None:
    """Share of right answers on the test batches; None where the task has none."""
    if not task.test:
        return None
    model.eval()
    right = sum((model(**batch).logits.argmax(-1) == batch["labels"]).sum().item() for batch in task.test)
    model.train()
    return right / sum(len(batch["labels"]) for batch in task.test)


class ByteBatches:
    """Sequences from random places of the text."""

    def __init__(self, text: np.ndarray, seed: int) -> None:
        self.text, self.seed = text, seed

    def __getitem__(self, number: int) -> Batch:
        random = np.random.default_rng([self.seed, number])
        starts = random.integers(len(self.text) - BYTES_LENGTH + 1, size=BYTES_BATCH_SIZE)
        return _batch(np.stack([self.text[start : start + BYTES_LENGTH] for start in starts]))


def bytes_task() -> Task:
    """The task, on the sources that the running Python has."""
    parts = [split_text(module_source(name)) for name in MODULES]
    training = np.concatenate([part for part, _ in parts])
    held_out = _spread(np.concatenate([windows(part) for _, part in parts]))
    return Task(
        name="bytes",
        data=f"modules of Python {platform.python_version()}",
        steps_per_epoch=None,
        model_class=GPT2LMHeadModel,
        build_config=_config,
        target_modules=["c_attn", "c_proj", "c_fc"],  # an embedding of 256 rows is too small to be worth a train
        batches=lambda seed: ByteBatches(training, seed),
        held_out=[_batch(held_out[i : i + BYTES_BATCH_SIZE]) for i in range(0, len(held_out), BYTES_BATCH_SIZE)],
        loss=model_loss,
        num_targets=lambda batch: batch["labels"][:, 1:].numel(),
    )


def module_source(name: str) -> bytes:
    """The source of a module.

    Raises:
        ValueError: If this Python comes without its sources.
    """
    try:
        return inspect.getsource(importlib.import_module(name)).encode()
    except OSError as error:
        raise ValueError(
            f"The source of module {name} was not found: this Python seems to come without the sources of its "
            "library. Task bytes needs them; use one that has them, or task code with --code_file."
        ) from error


def split_text(source: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and the last part, which is held out."""
    values = np.frombuffer(source, dtype=np.uint8)
    cut = len(values) - int(len(values) * HELD_OUT_SHARE)
    return values[:cut], values[cut:]


def windows(values: np.ndarray) -> np.ndarray:
    """``values`` cut into sequences, one a row, the odd rest left out."""
    return values[: len(values) // BYTES_LENGTH * BYTES_LENGTH].reshape(-1, BYTES_LENGTH)


def _spread(rows: np.ndarray) -> np.ndarray:
    """As many rows as are measured on, from all over."""
    number = min(HELD_OUT_SEQUENCES, len(rows))
    return rows[np.arange(number) * len(rows) // number]


def _batch(rows: np.ndarray) -> Batch:
    ids = torch.from_numpy(rows.astype(np.int64))
    return {"input_ids": ids, "labels": ids}


def _config(width: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=256, n_positions=BYTES_LENGTH, n_embd=width, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def code_task(code_file: str | None) -> Task:
    """The task, on a file with the columns code and docstring, or on the standard library's functions.

    Raises:
        ValueError: If the file has no rows or no column that is understood.
    """
    settings = DataSettings(train_file=code_file, max_eval_samples=HELD_OUT_FUNCTIONS)
    text = load_corpus(settings)
    tokenizer = train_tokenizer(text["train"], DEMO_VOCABULARY)
    encoded = encode_corpus(text, tokenizer, DEMO_LENGTH)
    lengths = {name: sequence_lengths(rows) for name, rows in encoded.items()}

    def masking(seed: int) -> Masking:
        return Masking.for_tokenizer(tokenizer, settings.mlm_probability, seed)

    def batches(seed: int) -> TrainingBatches:
        return TrainingBatches(encoded["train"], lengths["train"], masking(seed), batch_size=CODE_BATCH_SIZE)

    def build_config(width: int) -> RobertaConfig:
        shape = SMALL_ROBERTA | {"hidden_size": width, "intermediate_size": 4 * width}
        config = RobertaConfig(max_position_embeddings=DEMO_LENGTH + 2, **shape)
        fit_to_tokenizer(config, tokenizer, pretrained=False)
        return config

    return Task(
        name="code",
        data=Path(code_file).name if code_file else f"functions of Python {platform.python_version()}",
        steps_per_epoch=batches(0).batches_per_epoch,
        model_class=RobertaForMaskedLM,
        build_config=build_config,
        target_modules=None,
        batches=batches,
        held_out=held_out_batches(
            encoded["validation"], lengths["validation"], masking(HELD_OUT_SEED), CODE_HELD_OUT_BATCH_SIZE
        ),
        loss=model_loss,
        num_targets=lambda batch: int((batch["labels"] != IGNORED).sum()),
    )


def nli_task(nli_file: str, tokenizer_folder: str) -> Task:
    """The task, on a parquet file with the columns premise, hypothesis, label and fold.

    Raises:
        ValueError: If a column or a fold is missing, or there are not enough rows for one batch.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = read_pairs(nli_file)
    labels = sorted(set(rows["label"]))
    numbers = [labels.index(label) for label in rows["label"]]
    numbered = rows.remove_columns("label").add_column("label", numbers)
    encoded = encode_pairs(numbered, tokenizer, NLI_LENGTH)
    folds = np.array(rows["fold"])
    pairs = {fold: Pairs(encoded.select(np.flatnonzero(folds == fold)), tokenizer.pad_token_id or 0) for fold in FOLDS}

    def build_config(width: int) -> BertConfig:
        return BertConfig(
            vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=4 * width, max_position_embeddings=NLI_LENGTH, num_labels=len(labels),
        )  # fmt: skip

    return Task(
        name="nli",
        data=Path(nli_file).name,
        steps_per_epoch=len(pairs["train"].lengths) // NLI_BATCH_SIZE,
        model_class=BertForSequenceClassification,
        build_config=build_config,
        target_modules=None,
        batches=lambda seed: PairBatches(pairs["train"], batch_size=NLI_BATCH_SIZE, seed=seed),
        held_out=pairs["valid"].in_order(NLI_MEASURING_BATCH_SIZE, HELD_OUT_PAIRS),
        loss=model_loss,
        num_targets=lambda batch: len(batch["labels"]),
        test=pairs["test"].in_order(NLI_MEASURING_BATCH_SIZE),
    )


def read_pairs(nli_file: str) -> Dataset:
    """The rows of the file.

    Raises:
        ValueError: If a column or a fold is missing, or there are not enough rows for one batch.
    """
    rows = load_dataset("parquet", data_files=nli_file, split="train")
    missing = [name for name in COLUMNS if name not in rows.column_names]
    if missing:
        raise ValueError(
            f"--nli_file {nli_file} has the columns {', '.join(rows.column_names)}, but not {', '.join(missing)}. "
            f"It needs {', '.join(COLUMNS)}; rename its columns to these."
        )
    counts = {fold: list(rows["fold"]).count(fold) for fold in FOLDS}
    if counts["train"] < NLI_BATCH_SIZE or not counts["valid"] or not counts["test"]:
        raise ValueError(
            f"--nli_file {nli_file} has {counts} rows by the column fold. It needs at least {NLI_BATCH_SIZE} for "
            "train, and some for valid and test."
        )
    return rows
