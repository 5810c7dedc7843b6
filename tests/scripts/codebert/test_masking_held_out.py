"""scripts/codebert/masking.py: both held-out losses are means over the same hidden tokens."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import RobertaConfig, RobertaForMaskedLM

from codebert.masking import HeldOut, Masking, count_tokens, held_out_batches

SPECIAL = (0, 1, 2, 3, 4)


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    sequences = [[0, *random.integers(5, 50, size=size).tolist(), 2] for size in (5, 20, 11, 8, 30)]
    return Dataset.from_dict({"input_ids": sequences})


@pytest.fixture
def held_out(rows):
    masking = Masking(probability=0.3, mask_id=4, pad_id=1, special_ids=SPECIAL, vocab_size=50, seed=0)
    return HeldOut(held_out_batches(rows, np.array([len(ids) for ids in rows["input_ids"]]), masking, 2))


def test_counts(rows):
    counts = count_tokens(rows, 50, SPECIAL)
    assert counts.sum() == 5 + 20 + 11 + 8 + 30
    assert counts[list(SPECIAL)].sum() == 0
    assert counts[7] == sum(ids.count(7) for ids in rows["input_ids"])


def test_unigram_model_is_add_one_smoothed(held_out):
    counts = np.zeros(50, dtype=np.int64)
    assert held_out.unigram_loss(counts) == pytest.approx(np.log(50))
    labels = torch.cat([batch["labels"][batch["labels"] != -100] for batch in held_out.batches])
    counts[10] = 100
    expected = [-np.log((101 if label == 10 else 1) / 150) for label in labels.tolist()]
    assert held_out.unigram_loss(counts) == pytest.approx(np.mean(expected))
    assert held_out.num_targets == len(labels)


def test_loss_is_the_mean_over_all_hidden_tokens_and_keeps_the_mode(held_out):
    config = RobertaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = RobertaForMaskedLM(config).train()
    loss = held_out.loss(Accelerator(cpu=True), model)
    assert model.training
    model.eval()
    with torch.no_grad():
        sums = [model(**batch).loss.item() * (batch["labels"] != -100).sum().item() for batch in held_out.batches]
    assert loss == pytest.approx(sum(sums) / held_out.num_targets, rel=1e-5)
