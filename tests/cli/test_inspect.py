"""hf_comera/cli/inspect.py: layers, ranks, sizes and origin of a checkpoint, printed, as JSON and drawn."""

import json

import pytest

from hf_comera.cli.layer_table import plan_as_json
from hf_comera.hub.inspection import inspect_checkpoint


def test_json_has_all_layers_and_the_origin(checkpoints, call):
    found = call("inspect", checkpoints / "compressed", "--json").json()
    expected = plan_as_json(inspect_checkpoint(checkpoints / "compressed").plan)
    assert found["layers"] == json.loads(json.dumps(expected["layers"]))
    assert found["class"] == "BertForMaskedLM"
    assert found["dtypes"] == ["F32"]
    assert found["provenance"]["save_id"]


def test_the_table_is_followed_by_sizes_and_origin(checkpoints, call):
    answer = call("inspect", checkpoints / "compressed")
    assert answer.code == 0
    assert "B of F32." in answer.out
    assert "- save id: " in answer.out
    assert max(map(len, answer.out.splitlines())) <= 100


def test_a_picture_is_drawn(checkpoints, tmp_path, call):
    pytest.importorskip("matplotlib")
    answer = call("inspect", checkpoints / "gpt2", "--picture", tmp_path / "ranks.svg")
    assert answer.code == 0, answer.error
    assert "<svg" in (tmp_path / "ranks.svg").read_text()
    assert "- picture of the ranks: " in answer.out


def test_a_dense_checkpoint_is_refused(checkpoints, call):
    answer = call("inspect", checkpoints / "dense")
    assert answer.code == 2
    assert "is dense, and the folder of a compressed checkpoint is needed" in answer.said
