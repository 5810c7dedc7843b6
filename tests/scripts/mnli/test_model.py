"""scripts/mnli/model.py: the model has the published size, and overrides that do not fit are told."""

import pytest
import torch

from hf_comera import is_comera_model, size_report
from mnli.model import (
    DENSE_PARAMETERS,
    TARGETS,
    TENSOR_TRAIN_PARAMETERS,
    build_config,
    build_model,
    describe_shapes,
    load_tokenizer,
    shapes,
    six_encoders,
)
from mnli.settings import ModelSettings

TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"
# Of the paper's code, which counts its rank gates: one number for each rank between two cores.
PUBLISHED_PARAMETERS = 1_490_157
GATES = 3 * 32 + 25 * (12 + 30 + 30 + 30 + 12) + 12 * (12 + 30 + 30 + 30 + 16)


class Words:
    """As much of a tokenizer as the configuration asks for."""

    pad_token_id = 0

    def __init__(self, size=30522):
        self.size = size

    def __len__(self):
        return self.size


def test_six_encoders_have_the_published_size():
    config = build_config(None, Words(), 128)
    model = build_model(ModelSettings(), config)
    sizes = size_report(model)
    assert sizes.parameters == TENSOR_TRAIN_PARAMETERS
    assert sizes.dense_parameters == DENSE_PARAMETERS == 66_957_315
    assert sizes.parameters + GATES == PUBLISHED_PARAMETERS
    assert describe_shapes(ModelSettings(), config) == "paper"


def test_ranks_and_factors_are_the_papers():
    model = build_model(ModelSettings(), build_config("num_hidden_layers=1", Words(), 128))
    planned = {layer.name.partition("layer.0.")[2] or layer.name: layer for layer in model.comera_plan()}
    assert planned["attention.self.query"].ranks == (12, 30, 30, 30, 12)
    assert planned["intermediate.dense"].ranks == (12, 30, 30, 30, 16)
    assert planned["output.dense"].ranks == (16, 30, 30, 30, 12)
    assert planned["output.dense"].in_factors == (16, 16, 12)
    assert planned["bert.pooler.dense"].ranks == (12, 30, 30, 30, 12)
    assert planned["bert.embeddings.word_embeddings"].out_factors == (4, 4, 8, 6)


OTHERS = [
    pytest.param(six_encoders(), 8, 8, id="rank-asked-for"),
    pytest.param(six_encoders(hidden_size=256, num_attention_heads=4), None, 30, id="other-width"),
    pytest.param(six_encoders(vocab_size=50_000), None, 30, id="vocabulary-too-large"),
]


@pytest.mark.parametrize(("config", "rank", "expected"), OTHERS)
def test_other_shapes_have_the_librarys_factors(config, rank, expected):
    chosen = shapes(config, rank)
    assert (chosen.rank, chosen.factor_pattern, chosen.target_modules) == (expected, {}, TARGETS)
    assert describe_shapes(ModelSettings(rank=rank), config) == f"rank {expected}"


@pytest.mark.parametrize("dense", [False, True])
def test_model_has_three_classes(dense):
    model = build_model(ModelSettings(dense=dense, rank=None if dense else 4), build_config(TINY, Words(100), 16))
    assert is_comera_model(model) is not dense
    assert model.config.id2label == {0: "entailment", 1: "neutral", 2: "contradiction"}
    assert model(input_ids=torch.ones(2, 5, dtype=torch.long)).logits.shape == (2, 3)


REFUSED = [
    ("hiden_size=256", 32, "'hiden_size=256' changes nothing.*hidden_size.*for example hidden_size=256"),
    ("hidden_size", 32, "'hidden_size' changes nothing that can be changed here.*name=value"),
    ("vocab_size=5", 32, "'vocab_size=5' changes nothing that can be changed here"),
    ("hidden_size=wide", 32, "hidden_size=wide: invalid literal.*for example num_hidden_layers=4"),
    ("hidden_size=256", 32, "makes hidden_size=256 and num_attention_heads=12. The heads must divide"),
    (TINY, 600, "--max_length 600 is more than the 512 positions.*max_position_embeddings=600"),
]


@pytest.mark.parametrize(("overrides", "max_length", "message"), REFUSED)
def test_refused(overrides, max_length, message):
    with pytest.raises(ValueError, match=message):
        build_config(overrides, Words(), max_length)


def test_missing_tokenizer_is_named(tmp_path):
    needed = r"(?s)--tokenizer_name .* no tokenizer could be loaded.*for example google-bert"
    with pytest.raises(ValueError, match=needed):
        load_tokenizer(str(tmp_path))
