"""Masked language modelling: which sequences form a batch, which tokens are hidden, and the held-out loss on those.

Everything random is a pure function of the seed and a position: the order of an epoch of (seed, epoch), the masks of a
batch of (seed, batch, process). A resumed run therefore sees exactly what an uninterrupted one would have seen.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from loop.batches import EpochBatches

if TYPE_CHECKING:
    from datasets import Dataset  # only named: the GPU report takes batches and losses where it is not installed

IGNORED = -100
# Streams of random numbers that must not meet, nor that of the order of an epoch.
_TRAINING, _HELD_OUT = range(2)


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How tokens are hidden: of the chosen ones 80% become the mask, 10% a random token, 10% stay."""

    probability: float
    mask_id: int
    pad_id: int
    special_ids: tuple[int, ...]
    vocab_size: int
    seed: int

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int) -> "Masking":
        """The masking with the ids of ``tokenizer``."""
        return cls(
            probability=probability,
            mask_id=tokenizer.mask_token_id,
            pad_id=tokenizer.pad_token_id,
            special_ids=tuple(sorted(set(tokenizer.all_special_ids))),
            vocab_size=len(tokenizer),
            seed=seed,
        )

    @functools.cached_property
    def ordinary_ids(self) -> np.ndarray:
        """The vocabulary without the special tokens."""
        return np.setdiff1d(np.arange(self.vocab_size), self.special_ids)

    def batch(self, sequences: list[list[int]], *position: int) -> dict[str, Tensor]:
        """Pad ``sequences`` to the longest and hide some of their tokens.

        Args:
            sequences: Token ids with the special tokens in place.
            position: Numbers that say which batch this is; the same numbers give the same masks.

        Returns:
            ``input_ids``, ``attention_mask`` and ``labels``, the latter -100 where nothing is to be guessed.
        """
        width = max(map(len, sequences))
        width += -width % 8
        ids = np.full((len(sequences), width), self.pad_id, dtype=np.int64)
        attention = np.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
            attention[row, : len(sequence)] = 1
        hidden, labels = self._hide(ids, np.random.default_rng([self.seed, *position]))
        arrays = {"input_ids": hidden, "attention_mask": attention, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _hide(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        ordinary = ~np.isin(ids, self.special_ids)
        chosen = ordinary & (random.random(ids.shape) < self.probability)
        if not chosen.any() and ordinary.any():  # a loss over nothing would be NaN
            chosen.flat[random.choice(np.flatnonzero(ordinary))] = True
        fate = random.random(ids.shape)
        replacements = random.choice(self.ordinary_ids, size=ids.shape)
        hidden = np.where(chosen & (fate < 0.8), self.mask_id, ids)
        hidden = np.where(chosen & (fate >= 0.8) & (fate < 0.9), replacements, hidden)
        return hidden, np.where(chosen, ids, IGNORED)


class TrainingBatches(EpochBatches):
    """The masked batches of one process, by number, for as many epochs as are asked for.

    Args:
        rows: Sequences of token ids.
        lengths: Their lengths.
        masking: How tokens are hidden.
        batch_size: Sequences a batch.
        process: Index of this process and number of all.

    Raises:
        ValueError: If there are not enough sequences for one batch in each process.
    """

    def __init__(
        self,
        rows: "Dataset",
        lengths: np.ndarray,
        masking: Masking,
        *,
        batch_size: int,
        process: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(lengths, batch_size=batch_size, seed=masking.seed, process=process)
        self.rows, self.masking = rows, masking

    def make(self, chosen: np.ndarray, number: int) -> dict[str, Tensor]:
        """The rows ``chosen``, masked as their place in the run says."""
        sequences = self.rows[chosen.tolist()]["input_ids"]
        return self.masking.batch(sequences, _TRAINING, number, self.process_index)


def held_out_batches(
    rows: "Dataset", lengths: np.ndarray, masking: Masking, batch_size: int
) -> list[dict[str, Tensor]]:
    """All rows in batches of like length, masked once and for all."""
    order = np.argsort(lengths, kind="stable")
    chosen = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [masking.batch(rows[ids.tolist()]["input_ids"], _HELD_OUT, number) for number, ids in enumerate(chosen)]


class HeldOut:
    """A fixed masked sample of the held-out text.

    Args:
        batches: The sample, masked; every process holds all of it and measures its share.
    """

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.batches = batches
        self.num_targets = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)

    @torch.no_grad()
    def loss(self, accelerator: Accelerator, model: nn.Module) -> float:
        """Mean cross-entropy over all hidden tokens, in nats, without dropout."""
        # Not the wrapper of distributed training: it communicates in each forward, but processes have unequal shares.
        model = accelerator.unwrap_model(model)
        was_training = model.training
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for batch in self.batches[accelerator.process_index :: accelerator.num_processes]:
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            total += model(**batch).loss.double() * (batch["labels"] != IGNORED).sum()
        model.train(was_training)
        return accelerator.reduce(total, reduction="sum").item() / self.num_targets

    def unigram_loss(self, token_counts: np.ndarray) -> float:
        """Mean cross-entropy of guessing by how often tokens occur in training, with one added to each count."""
        labels = np.concatenate([batch["labels"][batch["labels"] != IGNORED].numpy() for batch in self.batches])
        log_probabilities = np.log(token_counts + 1.0) - np.log(token_counts.sum() + len(token_counts))
        return float(-log_probabilities[labels].mean())


def count_tokens(rows: "Dataset", vocab_size: int, special_ids: tuple[int, ...]) -> np.ndarray:
    """How often each token occurs in ``rows``; special tokens, which are never hidden, count as 0."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.with_format("arrow").iter(batch_size=10_000):
        ids = table["input_ids"].combine_chunks().flatten().to_numpy()
        counts += np.bincount(ids, minlength=vocab_size)
    counts[list(special_ids)] = 0
    return counts
