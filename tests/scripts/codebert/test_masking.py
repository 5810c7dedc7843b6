"""scripts/codebert/masking.py: masks and order follow from nothing but seed and position."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from codebert.masking import IGNORED, Masking, TrainingBatches, held_out_batches
from loop.batches import epoch_order

VOCABULARY = 1000


@pytest.fixture
def masking():
    return Masking(probability=0.15, mask_id=4, pad_id=1, special_ids=(0, 1, 2, 3, 4), vocab_size=VOCABULARY, seed=7)


def sequences(count=64, longest=120):
    random = np.random.default_rng(1)
    lengths = random.integers(10, longest, size=count)
    return [[0, *random.integers(5, VOCABULARY, size=length - 2).tolist(), 2] for length in lengths]


def stream(masking, batch_size=4, count=64, process=(0, 1)):
    rows = sequences(count)
    lengths = np.array([len(row) for row in rows])
    return TrainingBatches(
        Dataset.from_dict({"input_ids": rows}), lengths, masking, batch_size=batch_size, process=process
    )


def test_masks_depend_on_seed_and_position_only(masking):
    first = masking.batch(sequences(), 0, 3, 0)
    np.random.default_rng().random(100)
    torch.rand(7)
    again = masking.batch(sequences(), 0, 3, 0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    others = [masking.batch(sequences(), 0, 4, 0), masking.batch(sequences(), 0, 3, 1)]
    assert not any(torch.equal(first["labels"], other["labels"]) for other in others)


def test_rates(masking):
    batch = masking.batch(sequences(2000), 0, 0, 0)
    rest = masking.batch(sequences(2000), 0, 1, 0)
    plain = torch.where(rest["labels"] != IGNORED, rest["labels"], rest["input_ids"])
    chosen = batch["labels"] != IGNORED
    ordinary = plain > 4
    assert torch.equal(batch["labels"][chosen], plain[chosen])
    assert torch.equal(batch["input_ids"][~chosen], plain[~chosen])
    assert not chosen[~ordinary].any()
    assert chosen.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.005)
    masked = batch["input_ids"][chosen] == 4
    kept = batch["input_ids"][chosen] == plain[chosen]
    assert masked.float().mean() == pytest.approx(0.8, abs=0.01)
    assert kept.float().mean() == pytest.approx(0.1, abs=0.01)
    assert (batch["input_ids"][chosen & (batch["input_ids"] != 4)] > 4).all()


def test_padding_is_to_the_longest_and_never_seen(masking):
    batch = masking.batch([[0, 10, 2], [0, *range(5, 16), 2]], 0, 0, 0)
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist() == [3, 13]
    assert (batch["input_ids"][0, 3:] == 1).all()


def test_something_is_always_hidden(masking):
    for number in range(50):
        batch = masking.batch([[0, 10, 2]], 0, number, 0)
        assert (batch["labels"] != IGNORED).sum() == 1


def test_epoch_is_a_permutation_with_like_lengths_together():
    lengths = np.random.default_rng(0).integers(5, 500, size=1003)
    order = epoch_order(lengths, 10, seed=3, epoch=0)
    assert order.shape == (100, 10)
    assert len(np.unique(order)) == 1000
    spread = np.ptp(lengths[order], axis=1).mean()
    assert spread < 0.25 * np.ptp(lengths[np.random.default_rng(1).permutation(1000).reshape(100, 10)], axis=1).mean()


def test_epochs_differ_and_repeat_for_the_same_seed():
    lengths = np.random.default_rng(0).integers(5, 500, size=100)
    orders = [epoch_order(lengths, 10, seed, epoch) for seed, epoch in ((3, 0), (3, 1), (4, 0))]
    assert not any(np.array_equal(orders[0], other) for other in orders[1:])
    assert np.array_equal(orders[0], epoch_order(lengths, 10, 3, 0))


def test_batches_do_not_depend_on_those_before(masking):
    in_order, backwards = stream(masking), stream(masking)
    first = [in_order[number]["input_ids"] for number in range(40)]
    second = [backwards[number]["input_ids"] for number in reversed(range(40))][::-1]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_processes_share_out_an_epoch(masking):
    parts = [stream(masking, batch_size=4, process=(index, 2)) for index in range(2)]
    assert [part.batches_per_epoch for part in parts] == [8, 8]
    seen = []
    for part in parts:
        for number in range(8):
            batch = part[number]
            original = torch.where(batch["labels"] != IGNORED, batch["labels"], batch["input_ids"])
            seen += [tuple(row.tolist()) for row in original[:, :8]]
    assert len(set(seen)) == 64


def test_too_few_sequences_for_a_batch(masking):
    with pytest.raises(ValueError, match="--per_device_train_batch_size 3 or less"):
        stream(masking, batch_size=4, count=6, process=(0, 2))


def test_held_out_batches_are_fixed_and_complete(masking):
    rows = sequences(10)
    batches, again = (
        held_out_batches(Dataset.from_dict({"input_ids": rows}), np.array([len(row) for row in rows]), masking, 4)
        for _ in range(2)
    )
    assert sum(len(batch["labels"]) for batch in batches) == 10
    assert all(torch.equal(one["labels"], two["labels"]) for one, two in zip(batches, again, strict=True))
