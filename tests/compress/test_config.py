"""hf_comera/compress/config.py: settings survive JSON, bad ones raise, newer checkpoints are told apart from typos."""

import json
import logging

import pytest

from hf_comera import ComeraConfig


def test_round_trip_through_json():
    config = ComeraConfig(
        rank=12,
        target_modules=["q_proj"],
        rank_pattern={"layers.0.q_proj": 4},
        factor_pattern={"q_proj": {"in_factors": [4, 12]}},
        layers={"q_proj": {"kind": "tt_linear", "in_factors": [4, 12], "out_factors": [6, 8], "ranks": [2, 2, 2]}},
    )
    assert ComeraConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict()["quant_method"] == "comera"


LAYER = {"kind": "tt_linear", "in_factors": [4], "out_factors": [6], "ranks": [2]}


@pytest.mark.parametrize(
    ("settings", "version"),
    [
        ({}, 1),
        ({"layers": {"q": LAYER}}, 1),
        ({"layers": {"q": {**LAYER, "ranks": [0]}}}, 3),
        ({"layers": {"q": {**LAYER, "rank_gates": True}}}, 3),
        ({"embedding_width": 8}, 4),
        ({"storage": "int8", "embedding_width": 8}, 5),
        ({"storage": {"query": "int4", "*": "float"}, "layers": {}}, 5),
    ],
)
def test_the_lowest_format_that_can_say_it_is_written(settings, version):
    config = ComeraConfig(**settings)
    assert config.to_dict()["format_version"] == version
    assert json.loads(config.to_json_string())["format_version"] == version
    assert ComeraConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_changing_the_dictionary_does_not_change_the_config():
    config = ComeraConfig(rank_pattern={"a": 3})
    config.to_dict()["rank_pattern"]["a"] = 5
    assert config.rank_pattern == {"a": 3}


def test_unknown_settings_of_a_checkpoint_are_named_and_ignored(caplog):
    with caplog.at_level(logging.WARNING):
        config = ComeraConfig.from_dict({"rank": 8, "colour": "red", "format_version": 1})
    assert config.rank == 8
    assert "['colour'] of the checkpoint are unknown" in caplog.text


def test_that_there_is_no_rank_activation_may_be_said_but_is_not_kept(caplog):
    with caplog.at_level(logging.WARNING):
        read = ComeraConfig.from_dict({"rank": 8, "rank_activation": None, "format_version": 1})
    assert read == ComeraConfig(rank=8, rank_activation=None) == ComeraConfig(rank=8)
    assert "rank_activation" not in read.to_dict()
    assert not caplog.text


@pytest.mark.parametrize(
    ("recorded", "place"),
    [
        ({"rank_activation": "gelu"}, ""),
        ({"layers": {"q": {**LAYER, "rank_activation": "gelu"}}}, r"layers\['q'\]: "),
    ],
)
def test_a_checkpoint_with_a_rank_activation_is_refused(recorded, place):
    message = rf"config.json, quantization_config: {place}rank_activation='gelu' was removed.*loads with the release"
    with pytest.raises(ValueError, match=message):
        ComeraConfig.from_dict({"rank": 8, **recorded, "format_version": 2})


def test_a_newer_format_is_refused():
    with pytest.raises(ValueError, match=r"format_version=99, but this release reads up to 5. Install a newer"):
        ComeraConfig.from_dict({"rank": 8, "format_version": 99})


def test_a_misspelled_setting_raises():
    with pytest.raises(TypeError, match="rnak"):
        ComeraConfig(rnak=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0 is not a positive integer. Use at least 1, for example rank=30"),
        ({"rank": -4}, "rank=-4"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"rank": True}, "rank=True"),
        ({"num_factors": 0}, "num_factors=0.*num_factors=3"),
        ({"embedding_num_factors": -1}, "embedding_num_factors=-1"),
        ({"rank_pattern": {"q": 0}}, r"rank_pattern\['q'\]=0"),
        ({"rank_pattern": {"q": [3, 0]}}, r"rank_pattern\['q'\]=0"),
        ({"factor_pattern": {"q": [3, 4]}}, r"factor_pattern\['q'\]=\[3, 4\] is needed as a dictionary"),
        ({"factor_pattern": {"q": {"inputs": [3, 4]}}}, "in_factors, out_factors or both"),
        ({"rank_activation": "silu"}, "rank_activation='silu' was removed: .* learned no better.* Leave it out"),
        ({"rank_activation": False}, "rank_activation=False was removed"),
        ({"target_modules": []}, r"target_modules=\[\] selects nothing.*storage=.int8"),
        ({"target_modules": [], "storage": {"*": "float"}}, r"target_modules=\[\] selects nothing"),
        ({"storage": "int16"}, "storage='int16' is needed as 'float', 'int8', 'int4', or a dictionary"),
    ],
)
def test_bad_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        ComeraConfig(**settings)
