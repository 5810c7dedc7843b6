"""hf_comera/cli/explain.py: what the library explains of a live model, from the config alone."""

import dataclasses
import json

import pytest

from hf_comera import ComeraConfig, explain, get_comera_model
from tests.architectures import ARCHITECTURES


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_costs_are_those_of_a_live_model(training, checkpoints, call):
    model = get_comera_model(ARCHITECTURES["bert-mlm"].new_model(), ComeraConfig(rank=4))
    expected = explain(model, 2, 16, training=training)
    options = [] if training else ["--inference"]
    for source, settings in (("dense", ["--rank", "4"]), ("compressed", [])):
        found = call("explain", checkpoints / source, "-b", "2x16", *settings, *options, "--json").json()
        assert found["rows"] == [json.loads(json.dumps(dataclasses.asdict(row))) for row in expected.rows]


def test_notes_follow_the_table(checkpoints, call):
    answer = call("explain", checkpoints / "compressed", "--batch", "2x16")
    assert answer.code == 0
    assert "2 x 16 rows, forward and backward; counted, not timed" in " ".join(answer.out.split())
    assert "- No GPU: torch finds no CUDA device" in answer.out
