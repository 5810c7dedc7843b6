"""training/cuda_graphs/static_batch.py: batches of few shapes, padded with the right values, in memory that stays."""

import pytest
import torch

from hf_comera.training.cuda_graphs.static_batch import PaddingBuckets, StaticBatch, pad_values_of

VALUES = {"input_ids": 1, "attention_mask": 0, "labels": -100}


def batch(rows=2, length=5, **more):
    ids = torch.arange(2, 2 + rows * length).view(rows, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, **more}


@pytest.mark.parametrize(("length", "bucket"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, None)])
def test_the_next_bucket_is_taken(length, bucket):
    shapes = PaddingBuckets((8, 4, 4), VALUES).shapes(batch(length=length))
    assert shapes == (None if bucket is None else dict.fromkeys(VALUES, (2, bucket)))


def test_without_buckets_shapes_stay():
    strange = batch(pixel_values=torch.zeros(2, 3, 4, 4))
    assert PaddingBuckets(None, VALUES).shapes(strange) == {name: tuple(t.shape) for name, t in strange.items()}


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("labels", torch.tensor([1, 0])),
        ("labels", torch.zeros(2, 3)),
        ("num_items_in_batch", torch.tensor(7)),
        ("features", torch.zeros(2, 3)),
    ],
    ids=["classes", "several classes", "a number", "said to have no sequence"],
)
def test_what_has_no_sequence_stays(name, tensor):
    buckets = PaddingBuckets((8,), {**VALUES, "features": None})
    assert buckets.shapes(batch(**{name: tensor}))[name] == tuple(tensor.shape)


def test_what_nobody_knows_how_to_pad_is_refused():
    with pytest.raises(ValueError, match=r"'position_ids' of shape \(2, 5\).*pad_values={'position_ids': 0}"):
        PaddingBuckets((8,), VALUES).shapes(batch(position_ids=torch.zeros(2, 5)))


@pytest.mark.parametrize("lengths", [(), (0, 8), (True,), (8.0,), (-4,)], ids=str)
def test_bad_buckets_are_refused(lengths):
    with pytest.raises(ValueError, match="is needed as positive lengths to pad sequences to"):
        PaddingBuckets(lengths, VALUES)


def test_a_mask_is_added_where_there_is_padding_alone():
    bare = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    assert PaddingBuckets(None, VALUES).complete(bare).keys() == {"input_ids"}
    assert torch.equal(
        PaddingBuckets((8,), VALUES).complete(bare)["attention_mask"], torch.ones(2, 5, dtype=torch.long)
    )
    assert PaddingBuckets((8,), {"input_ids": 0}).complete(bare).keys() == {"input_ids"}


def test_a_static_batch_keeps_its_memory_and_no_old_entry():
    buckets = PaddingBuckets((8,), VALUES)
    first = batch(length=7, use_cache=False)
    static = StaticBatch(first, buckets.shapes(first), VALUES, torch.device("cpu"))
    places = {name: value.data_ptr() for name, value in static.values.items() if isinstance(value, torch.Tensor)}
    for length in (7, 8, 3):
        new = batch(length=length)
        static.fill(new)
        for name, value in VALUES.items():
            padded = torch.nn.functional.pad(new[name], (0, 8 - length), value=value)
            assert torch.equal(static.values[name], padded)
            assert static.values[name].data_ptr() == places[name]
    assert static.values["use_cache"] is False


def test_usual_values_follow_the_model_and_can_be_replaced():
    model = torch.nn.Linear(1, 1)
    assert pad_values_of(model, None)["input_ids"] == 0
    model.config = type("Config", (), {"pad_token_id": 7})
    values = pad_values_of(model, {"labels": -1, "position_ids": 0})
    assert (values["input_ids"], values["labels"], values["position_ids"]) == (7, -1, 0)
