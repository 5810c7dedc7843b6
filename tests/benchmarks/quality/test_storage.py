"""benchmarks/quality/storage.py: a small encoder is measured in every form and storage."""

from itertools import product

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks.quality import storage


@pytest.fixture
def encoder(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, vocab_size=40), add_pooling_layer=False).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_every_form_and_storage_is_measured(encoder):
    pairs = [{"sentence1": f"w{3 + n}", "sentence2": f"w{3 + 2 * n}", "score": n / 2} for n in range(10)]
    rows = storage.measure(encoder, pairs)
    assert [(row["form"], row["storage"]) for row in rows] == list(product(storage.FORMS, storage.STORAGES))
    errors = [row["error_percent"] for row in rows]
    assert errors[0] == errors[4] == 0
    assert all(0 < int8 < mixed < int4 for _, int8, mixed, int4 in (errors[:4], errors[4:]))
    assert all(-100 <= row["sts"] <= 100 for row in rows)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3, 1, 2], [3, 1, 2]), ([5, 5, 1, 5], [3, 3, 1, 3]), ([0, 0], [1.5, 1.5])],
    ids=str,
)
def test_equal_values_share_the_mean_of_their_places(values, expected):
    assert torch.equal(storage.ranks(torch.tensor(values)), torch.tensor(expected, dtype=torch.float64))
