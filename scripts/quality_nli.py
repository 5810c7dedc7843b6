"""Task "nli" of the quality benchmark: does one sentence follow from another? BERT from random weights."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, PreTrainedTokenizerBase

from epoch_batches import epoch_order
from quality_task import Batch, Task, model_loss

LENGTH, BATCH_SIZE, MEASURING_BATCH_SIZE = 96, 64, 128
HELD_OUT_PAIRS = 1024
COLUMNS = ("premise", "hypothesis", "label", "fold")
FOLDS = ("train", "valid", "test")


class Pairs:
    """Encoded pairs of one fold.

    Args:
        rows: Token ids, segment ids and label numbers.
        pad_id: What shorter rows of a batch are filled up with.
    """

    def __init__(self, rows: Dataset, pad_id: int) -> None:
        self.rows, self.pad_id = rows, pad_id
        self.lengths = np.array([len(ids) for ids in rows["input_ids"]])

    def batch(self, chosen: np.ndarray) -> Batch:
        """The rows ``chosen``, padded to the longest of them."""
        rows = self.rows[chosen.tolist()]
        ids = np.full((len(chosen), self.lengths[chosen].max()), self.pad_id, dtype=np.int64)
        segments, attention = np.zeros_like(ids), np.zeros_like(ids)
        for row, (tokens, kinds) in enumerate(zip(rows["input_ids"], rows["token_type_ids"], strict=True)):
            ids[row, : len(tokens)] = tokens
            segments[row, : len(tokens)] = kinds
            attention[row, : len(tokens)] = 1
        arrays = {"input_ids": ids, "token_type_ids": segments, "attention_mask": attention}
        labels = torch.tensor(rows["labels"])
        return {**{name: torch.from_numpy(array) for name, array in arrays.items()}, "labels": labels}

    def in_order(self, limit: int | None = None) -> list[Batch]:
        """All rows, or ``limit`` of them from all over, in batches of like length."""
        number = min(limit or len(self.lengths), len(self.lengths))
        chosen = np.arange(number) * len(self.lengths) // number
        chosen = chosen[np.argsort(self.lengths[chosen], kind="stable")]
        return [self.batch(chosen[i : i + MEASURING_BATCH_SIZE]) for i in range(0, number, MEASURING_BATCH_SIZE)]


class PairBatches:
    """Training batches: shuffled each epoch, like lengths together."""

    def __init__(self, pairs: Pairs, seed: int) -> None:
        self.pairs, self.seed = pairs, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, number: int) -> Batch:
        epoch, place = divmod(number, len(self.pairs.lengths) // BATCH_SIZE)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.pairs.lengths, BATCH_SIZE, self.seed, epoch)
        return self.pairs.batch(self._order[place])


def nli_task(nli_file: str, tokenizer_folder: str) -> Task:
    """The task, on a parquet file with the columns premise, hypothesis, label and fold.

    Raises:
        ValueError: If a column or a fold is missing, or there are not enough rows for one batch.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = read_pairs(nli_file)
    labels = sorted(set(rows["label"]))
    encode = partial(_encode, tokenizer=tokenizer, labels=labels)
    encoded = rows.map(encode, batched=True, remove_columns=rows.column_names, desc="tokenising")
    folds = np.array(rows["fold"])
    pairs = {fold: Pairs(encoded.select(np.flatnonzero(folds == fold)), tokenizer.pad_token_id or 0) for fold in FOLDS}

    def build_config(width: int) -> BertConfig:
        return BertConfig(
            vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=4 * width, max_position_embeddings=LENGTH, num_labels=len(labels),
        )  # fmt: skip

    return Task(
        name="nli",
        data=Path(nli_file).name,
        steps_per_epoch=len(pairs["train"].lengths) // BATCH_SIZE,
        model_class=BertForSequenceClassification,
        build_config=build_config,
        target_modules=None,
        batches=lambda seed: PairBatches(pairs["train"], seed),
        held_out=pairs["valid"].in_order(HELD_OUT_PAIRS),
        loss=model_loss,
        num_targets=lambda batch: len(batch["labels"]),
        test=pairs["test"].in_order(),
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
    if counts["train"] < BATCH_SIZE or not counts["valid"] or not counts["test"]:
        raise ValueError(
            f"--nli_file {nli_file} has {counts} rows by the column fold. It needs at least {BATCH_SIZE} for train, "
            "and some for valid and test."
        )
    return rows


def _encode(rows: dict[str, list], *, tokenizer: PreTrainedTokenizerBase, labels: list[str]) -> dict[str, list]:
    encoded = tokenizer(rows["premise"], rows["hypothesis"], truncation=True, max_length=LENGTH)
    return {
        "input_ids": encoded["input_ids"],
        "token_type_ids": encoded["token_type_ids"],
        "labels": [labels.index(label) for label in rows["label"]],
    }
