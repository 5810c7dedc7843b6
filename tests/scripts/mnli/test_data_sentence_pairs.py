"""scripts/mnli/data.py: batches hold whole pairs of like length, in training and in order."""

from itertools import chain

import numpy as np
from datasets import Dataset

from mnli.data import PairBatches, Pairs


def pairs(count=200):
    lengths = np.random.default_rng(0).integers(4, 40, size=count)
    rows = [
        {"input_ids": [n + 1] * length, "token_type_ids": [0, *[1] * (length - 1)], "labels": n % 3}
        for n, length in enumerate(lengths.tolist())
    ]
    return Pairs(Dataset.from_list(rows), pad_id=0), lengths


def test_batches_are_padded_and_masked():
    made, lengths = pairs(5)
    batch = made.batch(np.array([3, 1]))
    assert batch["input_ids"].shape == (2, max(lengths[3], lengths[1]))
    assert batch["attention_mask"].sum(1).tolist() == [lengths[3], lengths[1]]
    assert batch["token_type_ids"].sum(1).tolist() == [lengths[3] - 1, lengths[1] - 1]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
    assert batch["labels"].tolist() == [0, 1]


def test_an_epoch_has_each_pair_once_and_the_next_another_order():
    made, _ = pairs(192)
    stream = PairBatches(made, batch_size=64, seed=1)
    firsts = [stream[number]["input_ids"][:, 0].tolist() for number in range(6)]
    assert sorted(chain(*firsts[:3])) == sorted(chain(*firsts[3:])) == list(range(1, 193))
    assert firsts[:3] != firsts[3:]
    assert PairBatches(made, batch_size=64, seed=1)[4]["input_ids"][:, 0].tolist() == firsts[4]
    assert PairBatches(made, batch_size=64, seed=2)[4]["input_ids"][:, 0].tolist() != firsts[4]


def test_measured_pairs_come_from_all_over_and_are_sorted_by_length():
    made, lengths = pairs(300)
    assert sum(len(batch["labels"]) for batch in made.in_order(128)) == 300
    chosen = np.concatenate([batch["input_ids"][:, 0].numpy() - 1 for batch in made.in_order(128, limit=30)])
    assert sorted(chosen) == list(range(0, 300, 10))
    assert (np.diff(lengths[chosen]) >= 0).all()
