"""benchmarks/quality/storage.py: a small encoder is measured in every form and storage."""

from itertools import product

import pytest

from benchmarks.quality import storage
from tests.benchmarks.quality.encoders import new_encoder


@pytest.fixture
def encoder(tmp_path):
    return new_encoder(tmp_path)


def test_every_form_and_storage_is_measured(encoder):
    pairs = [{"sentence1": f"w{3 + n}", "sentence2": f"w{3 + 2 * n}", "score": n / 2} for n in range(10)]
    rows = storage.measure(encoder, pairs)
    assert [(row["form"], row["storage"]) for row in rows] == list(product(storage.FORMS, storage.STORAGES))
    errors = [row["error_percent"] for row in rows]
    assert errors[0] == errors[4] == 0
    assert all(0 < int8 < mixed < int4 for _, int8, mixed, int4 in (errors[:4], errors[4:]))
    assert all(-100 <= row["sts"] <= 100 for row in rows)
