"""Pairs of sentences as tokens: encoded, padded to the longest of a batch, in training batches or in order."""

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from epoch_batches import EpochBatches


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
