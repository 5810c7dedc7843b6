"""The held-out loss of a model, and that of a unigram model on the very same hidden tokens."""

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from masked_language import IGNORED, masked_loss


class HeldOut:
    """A fixed masked sample of the held-out text.

    Args:
        batches: The sample, masked; every process holds all of it and measures its share.
    """

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.batches = batches
        self.num_targets = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)

    def measure(self, accelerator: Accelerator, model: nn.Module) -> dict[str, float]:
        """All figures the training loop is to note down."""
        return {"held_out_loss": self.loss(accelerator, model)}

    @torch.no_grad()
    def loss(self, accelerator: Accelerator, model: nn.Module) -> float:
        """Mean cross-entropy over all hidden tokens, in nats, without dropout."""
        # Not the wrapper of distributed training: it communicates in each forward, but processes have unequal shares.
        model = accelerator.unwrap_model(model)
        was_training = model.training
        model.eval()
        total = 0.0
        for batch in self.batches[accelerator.process_index :: accelerator.num_processes]:
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            total += masked_loss(model, batch, reduction="sum").item()
        model.train(was_training)
        return (
            accelerator.reduce(torch.tensor(total, device=accelerator.device), reduction="sum").item()
            / self.num_targets
        )

    def unigram_loss(self, token_counts: np.ndarray) -> float:
        """Mean cross-entropy of guessing by how often tokens occur in training, with one added to each count."""
        labels = np.concatenate([batch["labels"][batch["labels"] != IGNORED].numpy() for batch in self.batches])
        log_probabilities = np.log(token_counts + 1.0) - np.log(token_counts.sum() + len(token_counts))
        return float(-log_probabilities[labels].mean())


def count_tokens(rows: Dataset, vocab_size: int, special_ids: tuple[int, ...]) -> np.ndarray:
    """How often each token occurs in ``rows``; special tokens, which are never hidden, count as 0."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.with_format("arrow").iter(batch_size=10_000):
        ids = table["input_ids"].combine_chunks().flatten().to_numpy()
        counts += np.bincount(ids, minlength=vocab_size)
    counts[list(special_ids)] = 0
    return counts
