"""benchmarks/quality/calibration.py: a small encoder is decomposed in every way, at the sizes that rows say."""

import pytest

from benchmarks.quality import calibration
from tests.benchmarks.quality.encoders import new_encoder


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_way_is_measured(tmp_path):
    folder = new_encoder(tmp_path, hidden_size=48, intermediate_size=96, max_position_embeddings=16)
    pairs = [{"sentence1": f"w{3 + n}", "sentence2": f"w{3 + 2 * n}", "score": n / 2} for n in range(10)]
    texts = [f"w{n % 37 + 3} w{n % 11 + 3} w{n % 5 + 3}" for n in range(64)]
    rows = calibration.measure(folder, texts, {"dev": pairs, "test": pairs[:5]})
    dense, *others = rows
    assert (len(others), dense["layers"]) == (13, "none")
    for row in others:
        assert row["parameters"] < dense["parameters"]
        assert -100 <= row["dev"] <= 100
    for row in others:
        if row["layers"] == "linear, words":
            assert row["parameters"] <= dense["parameters"] / (row["smaller"] - 0.05)
    by_way = {(row["ranks"], row["smaller"]): row["parameters"] for row in others if row["layers"] == "linear"}
    for smaller in calibration.LINEARS_SMALLER:
        assert by_way["plain", smaller] == by_way["equal", smaller]
        assert abs(by_way["sensitivity", smaller] - by_way["equal", smaller]) <= 6 * (48 + 96)  # a rank a layer
