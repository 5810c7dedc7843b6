"""scripts/codebert/model.py: the model is the one asked for, compressed or dense, as long and wide as it must be."""

import pytest
from datasets import Dataset
from transformers import BertConfig, DistilBertConfig, GPT2Config, RobertaConfig, RobertaForMaskedLM

from codebert.model import build_model, dense_twin, fit_to_tokenizer, load_config, longest_sequence
from codebert.settings import ModelSettings
from codebert.tokens import SMALLEST_VOCABULARY, train_tokenizer
from hf_comera import is_comera_model, size_report

TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"


@pytest.fixture
def tiny_folder(tmp_path):
    """A dense checkpoint."""
    config = RobertaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


def test_default_is_compressed_and_as_long_as_needed():
    settings = ModelSettings()
    config = load_config(settings, 200)
    assert longest_sequence(config) == 200
    model = build_model(settings, config)
    assert is_comera_model(model)
    assert size_report(model).ratio > 4


def test_overrides_reach_the_model():
    config = load_config(ModelSettings(config_overrides=TINY))
    assert (config.hidden_size, config.num_hidden_layers) == (32, 1)


def test_dense_twin_has_the_dense_size():
    settings = ModelSettings(config_overrides=TINY)
    model = build_model(settings, load_config(settings))
    twin = dense_twin(model)
    assert not is_comera_model(twin)
    assert size_report(twin).parameters == size_report(model).dense_parameters
    assert is_comera_model(model)


def test_named_configuration_with_random_weights(tiny_folder):
    settings = ModelSettings(config_name=tiny_folder)
    assert is_comera_model(build_model(settings, load_config(settings)))


def test_named_weights_are_decomposed_or_taken_as_they_are(tiny_folder):
    settings = ModelSettings(model_name_or_path=tiny_folder, rank=64)
    compressed = build_model(settings, load_config(settings))
    assert is_comera_model(compressed)
    dense = build_model(ModelSettings(model_name_or_path=tiny_folder, dense=True), load_config(settings))
    assert not is_comera_model(dense)


def test_compressed_checkpoint_is_continued_but_not_as_dense(tmp_path):
    settings = ModelSettings(config_overrides=TINY)
    model = build_model(settings, load_config(settings))
    model.save_pretrained(tmp_path)
    again = ModelSettings(model_name_or_path=str(tmp_path), rank=3)
    loaded = build_model(again, load_config(again))
    assert size_report(loaded).parameters == size_report(model).parameters
    dense = ModelSettings(model_name_or_path=str(tmp_path), dense=True)
    with pytest.raises(ValueError, match="tensor-train form already"):
        build_model(dense, load_config(dense))


def test_model_without_masked_head_is_refused(tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gpt2.*no masked language model"):
        load_config(ModelSettings(config_name=str(tmp_path)))


def test_missing_configuration_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_config(ModelSettings(config_name=str(tmp_path)))


POSITIONS = [
    pytest.param(RobertaConfig(max_position_embeddings=514), 512, id="roberta-starts-after-the-padding-id"),
    pytest.param(BertConfig(max_position_embeddings=512), 512, id="bert"),
    pytest.param(DistilBertConfig(max_position_embeddings=256), 256, id="distilbert"),
]


@pytest.mark.parametrize(("config", "expected"), POSITIONS)
def test_positions(config, expected):
    assert longest_sequence(config) == expected


def test_vocabulary_follows_the_tokenizer_unless_weights_are_trained():
    tokenizer = train_tokenizer(Dataset.from_dict({"text": ["x"]}), SMALLEST_VOCABULARY)
    config = RobertaConfig(vocab_size=100)
    with pytest.raises(ValueError, match="only 100 rows"):
        fit_to_tokenizer(config, tokenizer, pretrained=True)
    fit_to_tokenizer(config, tokenizer, pretrained=False)
    assert (config.vocab_size, config.pad_token_id) == (len(tokenizer), 1)
