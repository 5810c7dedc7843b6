"""Pairs of sentences from a data set or from files, their labels, their tokens and their batches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from loop.batches import EpochBatches, bucket
from loop.tables import read_table
from mnli.model import CLASSES
from mnli.settings import DataSettings

UNLABELLED = -1
COLUMNS = ("premise", "hypothesis", "label")
VALIDATION_NAMES = ("validation", "valid", "dev")
NEEDED = f"rows with {', '.join(COLUMNS)}"


def label_numbers(rows: Dataset, name: str) -> list[int]:
    """The class of each row; ``UNLABELLED`` where the label is missing, -1, empty or "-" (as in SNLI).

    Args:
        rows: Pairs with a column ``label``.
        name: Of the split, for messages.

    Raises:
        ValueError: If a label is none of the classes.
    """
    labels, feature = list(rows["label"]), rows.features["label"]
    if isinstance(feature, ClassLabel):
        labels = [feature.names[label] if label is not None and label >= 0 else None for label in labels]
    return [_number(label, f"Row {row} of {name}") for row, label in enumerate(labels)]


def _number(label: Any, where: str) -> int:
    if label is None or label != label:  # NaN: a missing number in a csv file
        return UNLABELLED
    if isinstance(label, float) and label.is_integer():  # numbers of a csv file in which some are missing
        label = int(label)
    text = str(label).strip().lower()
    if text in {"", "-", "-1"}:
        return UNLABELLED
    if text in CLASSES:
        return CLASSES.index(text)
    if text in {str(number) for number in range(len(CLASSES))}:
        return int(text)
    numbers = ", ".join(f"{number} ({name})" for number, name in enumerate(CLASSES))
    raise ValueError(
        f"{where} has label={label!r}, which is no class. Needed: {', '.join(CLASSES)}, or their numbers {numbers}; "
        f"unlabelled pairs have -1 or nothing. For example label={CLASSES[1]}."
    )


@dataclass(frozen=True, kw_only=True)
class NliData:
    """All labelled pairs, with the columns premise, hypothesis and label (a number)."""

    train: Dataset
    validation: Dataset
    """Chooses the checkpoint."""
    tests: dict[str, Dataset]
    """By name; empty where the data has none."""
    notes: list[str]
    """What was left out and how the parts were made, for the user."""


def load_pairs(settings: DataSettings) -> NliData:
    """The pairs of the source that the settings name.

    Raises:
        ValueError: If the source cannot be read, or a column, a label or a part is missing.
    """
    if settings.dataset_name:
        splits = _named(settings)
    elif settings.data_file:
        splits = _folds(read_table(settings.data_file, "data_file", NEEDED), settings)
    else:
        names = ("train", "validation", "test")
        files = {name: getattr(settings, f"{name}_file") for name in names if getattr(settings, f"{name}_file")}
        splits = {name: read_table(path, f"{name}_file", NEEDED) for name, path in files.items()}
    return make_parts(splits, settings)


def describe_source(settings: DataSettings) -> str:
    """The data in a few words, for tables."""
    file = settings.train_file or settings.data_file
    if file:
        return Path(file).name
    return " ".join(filter(None, (settings.dataset_name, settings.dataset_config)))


def make_parts(splits: DatasetDict | dict[str, Dataset], settings: DataSettings) -> NliData:
    """Labelled pairs of every split, and who does what.

    Without labelled test pairs the validation splits are the test; without validation pairs that are free, a part of
    the training pairs chooses the checkpoint.

    Raises:
        ValueError: If there are no training pairs, or a column or a label cannot be used.
    """
    notes: list[str] = []
    labelled = {name: _labelled(rows, name, notes) for name, rows in splits.items()}
    labelled = {name: rows for name, rows in labelled.items() if len(rows)}
    if "train" not in labelled:
        raise ValueError(
            f"The data has labelled pairs in {', '.join(labelled) or 'no split'}, but needs some in train."
        )
    train = labelled["train"]
    validations = {name: rows for name, rows in labelled.items() if name.startswith(VALIDATION_NAMES)}
    tests = {name: rows for name, rows in labelled.items() if name.startswith("test")}
    if unused := labelled.keys() - {"train"} - validations.keys() - tests.keys():
        notes.append(f"Not used, as neither train, validation nor test: {', '.join(sorted(unused))}.")
    if validations and tests:
        validation = concatenate_datasets(list(validations.values()))
    else:
        tests = tests or validations
        train, validation = _hold_out(train, settings.validation_split_percentage)
        notes.append(f"{len(validation):,} of the training pairs choose the checkpoint; no premise is on both sides.")
    if not tests:
        notes.append("There are no test pairs: the only accuracy is that on the pairs that choose the checkpoint.")
    if settings.max_train_samples is not None and settings.max_train_samples < len(train):
        notes.append(f"Used for training: the first {settings.max_train_samples:,} of {len(train):,} pairs.")
        train = train.select(range(settings.max_train_samples))
    return NliData(train=train, validation=validation, tests=tests, notes=notes)


def _named(settings: DataSettings) -> DatasetDict:
    try:
        return load_dataset(settings.dataset_name, settings.dataset_config)
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise ValueError(
            f"--dataset_name {settings.dataset_name} --dataset_config {settings.dataset_config} cannot be loaded: "
            f"{error} Needed: a data set on the Hub or a local folder, for example --dataset_name nyu-mll/glue "
            "--dataset_config mnli."
        ) from error


def _labelled(rows: Dataset, name: str, notes: list[str]) -> Dataset:
    """The rows with a label, numbered; how many have none goes into ``notes``."""
    missing = [column for column in COLUMNS if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"The pairs of {name} have the columns {', '.join(rows.column_names)}, but not {', '.join(missing)}. "
            f"Needed: {', '.join(COLUMNS)}. Rename the columns to these."
        )
    for column in COLUMNS[:2]:
        empty = next((row for row, text in enumerate(rows[column]) if not isinstance(text, str)), None)
        if empty is not None:
            raise ValueError(
                f"Row {empty} of {name} has {column}={rows[empty][column]!r}. Each row needs text there, for example "
                '"A man sleeps."'
            )
    numbers = label_numbers(rows, name)
    kept = [row for row, number in enumerate(numbers) if number != UNLABELLED]
    if len(kept) < len(numbers):
        notes.append(f"Left out of {name}: {len(numbers) - len(kept):,} of {len(numbers):,} pairs, without a label.")
    numbered = rows.select_columns(list(COLUMNS[:2])).add_column("label", numbers)
    return numbered if len(kept) == len(numbers) else numbered.select(kept)


def _hold_out(train: Dataset, percentage: int) -> tuple[Dataset, Dataset]:
    """The training pairs, and those taken out of them; pairs with the same premise stay together."""
    held_out = [bucket(premise) < percentage for premise in train["premise"]]
    if all(held_out) or not any(held_out):
        raise ValueError(
            f"--validation_split_percentage {percentage} takes {'all' if all(held_out) else 'none'} of the "
            f"{len(train)} training pairs for validation. Use another share, for example 10, or a --validation_file."
        )
    parts = [[row for row, out in enumerate(held_out) if out is wanted] for wanted in (False, True)]
    return train.select(parts[0]), train.select(parts[1])


def _folds(rows: Dataset, settings: DataSettings) -> dict[str, Dataset]:
    column = settings.fold_column
    if column not in rows.column_names:
        raise ValueError(
            f"--fold_column {column} is no column of {settings.data_file}, which has {', '.join(rows.column_names)}. "
            "Name the one that says train, validation or test for each pair, for example --fold_column fold."
        )
    folds: dict[str, list[int]] = {}
    for row, fold in enumerate(rows[column]):
        folds.setdefault(str(fold), []).append(row)
    if unknown := folds.keys() - {"train", "test", *VALIDATION_NAMES}:
        raise ValueError(
            f"--fold_column {column} of {settings.data_file} says {', '.join(sorted(unknown))}. "
            f"Each pair needs train, test, or one of {', '.join(VALIDATION_NAMES)}, for example train."
        )
    return {fold: rows.select(chosen) for fold, chosen in folds.items()}


class Pairs:
    """Encoded pairs.

    Args:
        rows: Token ids, segment ids and label numbers.
        pad_id: What shorter rows of a batch are filled up with.
        multiple: Batches are filled up to a multiple of this many tokens.
    """

    def __init__(self, rows: Dataset, pad_id: int, multiple: int = 1) -> None:
        self.rows, self.pad_id, self.multiple = rows, pad_id, multiple
        self.lengths = np.array([len(ids) for ids in rows["input_ids"]])

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, chosen: np.ndarray) -> dict[str, Tensor]:
        """The rows ``chosen``, padded to the longest of them."""
        rows = self.rows[chosen.tolist()]
        width = self.lengths[chosen].max()
        ids = np.full((len(chosen), width + -width % self.multiple), self.pad_id, dtype=np.int64)
        segments, attention = np.zeros_like(ids), np.zeros_like(ids)
        for row, (tokens, kinds) in enumerate(zip(rows["input_ids"], rows["token_type_ids"], strict=True)):
            ids[row, : len(tokens)] = tokens
            segments[row, : len(tokens)] = kinds
            attention[row, : len(tokens)] = 1
        arrays = {"input_ids": ids, "token_type_ids": segments, "attention_mask": attention}
        labels = torch.tensor(rows["labels"])
        return {**{name: torch.from_numpy(array) for name, array in arrays.items()}, "labels": labels}

    def spread(self, limit: int | None = None) -> np.ndarray:
        """The numbers of all rows, or of ``limit`` of them from all over; like lengths together."""
        number = min(limit or len(self), len(self))
        chosen = np.arange(number) * len(self) // number
        return chosen[np.argsort(self.lengths[chosen], kind="stable")]

    def in_order(self, batch_size: int, limit: int | None = None) -> list[dict[str, Tensor]]:
        """All rows, or ``limit`` of them from all over, in batches of like length."""
        chosen = self.spread(limit)
        return [self.batch(chosen[i : i + batch_size]) for i in range(0, len(chosen), batch_size)]


class PairBatches(EpochBatches):
    """Training batches of pairs: shuffled each epoch, like lengths together."""

    def __init__(self, pairs: Pairs, *, batch_size: int, seed: int, process: tuple[int, int] = (0, 1)) -> None:
        super().__init__(pairs.lengths, batch_size=batch_size, seed=seed, process=process)
        self.pairs = pairs

    def make(self, chosen: np.ndarray, number: int) -> dict[str, Tensor]:
        """The rows ``chosen``; the number of the batch does not matter."""
        return self.pairs.batch(chosen)


def encode_pairs(rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Token ids, segment ids and labels of rows with the columns premise, hypothesis and label (a number)."""

    def encode(batch: dict[str, list]) -> dict[str, list]:
        encoded = tokenizer(
            batch["premise"], batch["hypothesis"], truncation=True, max_length=max_length, return_token_type_ids=True
        )
        names = ("input_ids", "token_type_ids")
        return {**{name: encoded[name] for name in names}, "labels": batch["label"]}

    return rows.map(encode, batched=True, remove_columns=rows.column_names, desc="tokenising")
