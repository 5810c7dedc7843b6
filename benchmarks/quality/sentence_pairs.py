"""Quality of a sentence encoder: rank correlation of cosines of sentence pairs with the scores that people gave."""

from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet
from torch import Tensor

__all__ = ["quality", "ranks", "read_pairs"]

BATCH = 64


def read_pairs(path: Path, split: str, every: int = 1) -> list[dict[str, Any]]:
    """Every n-th pair of a split: dictionaries with sentence1, sentence2 and score."""
    return [row for row in parquet.read_table(path).to_pylist() if row["split"] == split][::every]


@torch.inference_mode()
def quality(model: Any, tokenizer: Any, pairs: list[dict[str, Any]]) -> float:
    """Spearman's rank correlation of cosines and scores, times 100; embeddings are means over tokens."""
    sentences = [pair[side] for side in ("sentence1", "sentence2") for pair in pairs]
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
    embeddings = torch.empty(len(sentences), model.config.hidden_size)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        batch = tokenizer(
            [sentences[index] for index in chosen], padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        mask = batch["attention_mask"].unsqueeze(-1)
        hidden = model(**batch).last_hidden_state
        embeddings[chosen] = torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=1)
    cosines = (embeddings[: len(pairs)] * embeddings[len(pairs) :]).sum(dim=1)
    scores = torch.tensor([pair["score"] for pair in pairs])
    return round(100 * float(torch.corrcoef(torch.stack([ranks(cosines), ranks(scores)]))[0, 1]), 2)


def ranks(values: Tensor) -> Tensor:
    """Places in ascending order; equal values share the mean of theirs."""
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(dim=0).double()
    return (ends - (counts - 1) / 2)[places]
