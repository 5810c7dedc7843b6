"""hf_comera/cli/plan.py and options.py: from a folder or a config alone the plan that the library makes."""

import json

import pytest

from hf_comera import ComeraConfig, plan
from hf_comera.cli.layer_table import plan_as_json
from tests.architectures import ARCHITECTURES


def expected(**settings):
    found = plan_as_json(plan(ARCHITECTURES["bert-mlm"].new_model(), ComeraConfig(**settings)))
    return json.loads(json.dumps(found))


@pytest.fixture
def config(tmp_path):
    """A config without weights."""
    ARCHITECTURES["bert-mlm"].new_config().save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_of_a_config_without_weights(config, call):
    found = call("plan", config, "--json").json()
    assert found.pop("class") == "BertForMaskedLM"
    assert found.pop("model") == str(config)
    assert found == expected()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--rank", "4"], {"rank": 4}),
        (["--num-factors", "2"], {"num_factors": 2}),
        (["--embedding-width", "16"], {"embedding_width": 16}),
        (["--target", "query", "-t", "value"], {"target_modules": ["query", "value"]}),
        (["--target", "all-linear"], {"target_modules": "all-linear"}),
        (["--target", r".*layer\.0\..*query"], {"target_modules": r".*layer\.0\..*query"}),
        (["-x", "word_embeddings", "--exclude", "key"], {"exclude_modules": ["word_embeddings", "key"]}),
        (["--rank-of", "query=3", "--rank-of", "key=2"], {"rank_pattern": {"query": 3, "key": 2}}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_are_settings(options, settings, checkpoints, call):
    found = call("plan", checkpoints / "dense", *options, "--json").json()
    assert found["layers"] == expected(**settings)["layers"]


def test_equal_layers_share_a_row(checkpoints, call):
    answer = call("plan", checkpoints / "dense", "--rank", "4")
    (row,) = [line.split() for line in answer.out.splitlines() if "self.query" in line]
    assert row[:2] == ["encoder.layer.*.attention.self.query", "2"]
    assert answer.out.startswith("Plan for BertForMaskedLM, names below bert")
    assert "- cls.predictions.decoder uses the cores of bert.embeddings.word_embeddings" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 100
    single = call("plan", checkpoints / "dense", "--rank", "4", "--every-layer")
    assert len([line for line in single.out.splitlines() if "self.query" in line]) == 2


def test_a_compressed_model_is_shown_as_it_is(checkpoints, call):
    found = call("plan", checkpoints / "compressed", "--json").json()
    assert {max(layer["ranks"]) for layer in found["layers"]} == {4}
    answer = call("plan", checkpoints / "compressed", "--rank", "3")
    assert answer.code == 2
    assert "is compressed already" in answer.said
    assert "rank cannot be chosen" in answer.said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "qury"], "target_modules: 'qury' matches no layer. Did you mean 'query'"),
        (["--exclude", "word_embedding"], "Did you mean 'word_embeddings'"),
        (["--rank", "0"], "rank=0 is not a positive integer"),
        (
            ["--rank-of", "query"],
            "Needed is a name and a number: --rank-of query=8",
        ),
        (["--rank-of", "qury=3"], "rank_pattern: 'qury' matches no layer"),
        (["--class", "AutoModelForMaskLM"], "Did you mean 'AutoModelForMaskedLM'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(options, words, checkpoints, call):
    answer = call("plan", checkpoints / "dense", *options)
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.said
