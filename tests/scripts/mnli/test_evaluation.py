"""scripts/mnli/evaluation.py: accuracy and loss count every pair once, whatever the size of the batches."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from mnli.data import Pairs
from mnli.evaluation import Accuracy, HeldOutPairs


class ByFirstToken(nn.Module):
    """Says the class that the first token names, more surely the longer the pair."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.9)

    def forward(self, input_ids, token_type_ids, attention_mask):
        sure = attention_mask.sum(1, keepdim=True).float()
        logits = sure * nn.functional.one_hot(input_ids[:, 0] % 3, 3)
        return SequenceClassifierOutput(logits=self.dropout(logits))


@pytest.fixture
def pairs():
    random = np.random.default_rng(0)
    rows = [
        {"input_ids": [n % 3 + 3] * length, "token_type_ids": [0] * length, "labels": int(random.integers(3))}
        for n, length in enumerate(random.integers(3, 20, size=29).tolist())
    ]
    return Pairs(Dataset.from_list(rows), pad_id=0, multiple=8)


@pytest.mark.parametrize("batch_size", [1, 8, 28, 29, 64])
def test_last_batch_counts(pairs, batch_size):
    accelerator, model = Accelerator(cpu=True), ByFirstToken()
    figures = HeldOutPairs(accelerator, pairs, batch_size).measure(accelerator, model)
    rows = list(pairs.rows)
    assert figures["accuracy"] == sum(row["input_ids"][0] % 3 == row["labels"] for row in rows) / 29
    losses = [
        nn.functional.cross_entropy(
            len(row["input_ids"]) * nn.functional.one_hot(torch.tensor(row["input_ids"][0] % 3), 3).float(),
            torch.tensor(row["labels"]),
        )
        for row in rows
    ]
    assert figures["held_out_loss"] == pytest.approx(float(sum(losses)) / 29, rel=1e-6)
    assert model.training


def test_measuring_draws_no_random_numbers(pairs):
    accelerator = Accelerator(cpu=True)
    before = torch.get_rng_state()
    HeldOutPairs(accelerator, pairs, 8).measure(accelerator, ByFirstToken())
    assert torch.equal(before, torch.get_rng_state())


def test_some_pairs_come_from_all_over(pairs):
    accelerator = Accelerator(cpu=True)
    assert HeldOutPairs(accelerator, pairs, 8, limit=10).num_pairs == 10
    assert HeldOutPairs(accelerator, pairs, 8, limit=100).num_pairs == 29


def test_metric_is_a_share():
    assert Accuracy(keep_in_memory=True).compute(predictions=[0, 1, 2, 2], references=[0, 1, 1, 2]) == {
        "accuracy": 0.75
    }


def test_batches_are_filled_up_to_a_multiple(pairs):
    assert all(batch["input_ids"].shape[1] % 8 == 0 for batch in pairs.in_order(5))
