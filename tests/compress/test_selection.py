"""hf_comera/compress/selection.py and targets.py: what is selected, and what a misspelled name gets."""

import logging
import re

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    MambaConfig,
    MambaModel,
    MarianConfig,
    SegformerConfig,
    Wav2Vec2Config,
)

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.compress.selection import DEFAULT_TARGETS, pattern_value, select_layers
from tests.architectures import ARCHITECTURES, every_architecture


@every_architecture
def test_defaults_are_attention_ffn_and_word_embedding(architecture):
    selected = select_layers(architecture.new_model(), ComeraConfig())
    assert len(selected) == architecture.num_layers + sum(
        "embed_tokens" in n and "block" not in n for n in selected
    ) * (architecture.config.model_type == "t5")
    assert not [name for name in selected if "position" in name or "token_type" in name or "classifier" in name]


# deit's default config does not build a model in Transformers 5.23; its row is vit's
@pytest.mark.parametrize("model_type", [name for name in DEFAULT_TARGETS if name != "deit"])
def test_every_row_of_the_table_selects_layers_of_each_block(model_type):
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(model_type))
    selected = select_layers(model, ComeraConfig())
    in_blocks = [name for name in selected if re.search(r"\.\d+\.", name)]
    blocks = {re.search(r"^.*?\.\d+\.", name)[0] for name in in_blocks}
    assert len(in_blocks) >= 4 * len(blocks)
    assert len(blocks) > 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_modules": ["query"]}, 2),
        ({"target_modules": ["layer.0.attention.self.query"]}, 1),
        ({"target_modules": r".*\.(query|key)"}, 4),
        ({"target_modules": ["query", "key"], "exclude_modules": ["key"]}, 2),
        ({"target_modules": ["query"], "exclude_modules": r".*layer\.1\..*"}, 1),
        ({"target_modules": "all-linear"}, 12),
        ({"exclude_modules": ["word_embeddings"]}, 12),
    ],
)
def test_peft_rules(settings, expected):
    model = ARCHITECTURES["bert-classifier"].new_model()
    assert len(select_layers(model, ComeraConfig(**settings))) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["querry"]}, "target_modules: 'querry' matches no layer. Did you mean 'query'"),
        ({"target_modules": ["query", "zzz"]}, "'zzz' matches no layer. This model has word_embeddings, "),
        ({"target_modules": r"encoder\.query"}, "matches no layer"),
        ({"rank_pattern": {"querry": 4}}, "rank_pattern: 'querry' matches no layer. Did you mean 'query'"),
        (
            {"factor_pattern": {"keys": {"in_factors": [4, 12]}}},
            "factor_pattern: 'keys' matches no layer. Did you",
        ),
        ({"target_modules": ["query"], "rank_pattern": {"key": 4}}, "rank_pattern: 'key' matches no layer"),
        ({"target_modules": ["LayerNorm"]}, "matches only layers of type LayerNorm, which cannot be compressed"),
        ({"target_modules": ["query"], "exclude_modules": ["query"]}, "leaves nothing to compress"),
        ({"target_modules": ["query"], "exclude_modules": ["kee"]}, "exclude_modules: 'kee' matches no layer"),
    ],
)
def test_names_that_do_not_fit_raise_with_near_misses(settings, message):
    with pytest.raises(ValueError, match=message):
        select_layers(ARCHITECTURES["bert-classifier"].new_model(), ComeraConfig(**settings))


def test_a_model_with_no_target_at_all_raises():
    with pytest.raises(
        ValueError,
        match=r"leaves nothing to compress in Sequential.*it has none.*LayerNorm \(1\)",
    ):
        select_layers(nn.Sequential(nn.LayerNorm(4)), ComeraConfig(target_modules="all-linear"))


def test_unknown_architectures_fall_back_aloud(caplog):
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    with caplog.at_level(logging.WARNING):
        selected = select_layers(MambaModel(config), ComeraConfig())
    assert "No default targets are known for model_type='mamba'" in caplog.text
    assert selected == ["embeddings", "layers.0.mixer.in_proj"]


def test_subclasses_of_linear_are_left_alone():
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict({"plain": nn.Linear(8, 8), "special": Special(8, 8)})
    assert select_layers(model, ComeraConfig(target_modules="all-linear")) == ["plain"]
    with pytest.raises(ValueError, match="matches only layers of type Special"):
        select_layers(model, ComeraConfig(target_modules=["special"]))


def test_pattern_values_match_ends_of_names():
    patterns = {r"layers\.0\.q_proj": 4, "q_proj": 8}
    assert pattern_value(patterns, "model.layers.0.q_proj") == 4
    assert pattern_value(patterns, "model.layers.1.q_proj") == 8
    assert pattern_value(patterns, "model.layers.1.k_proj") is None
    assert pattern_value({}, "q_proj") is None


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
WITHOUT_A_ROW = {
    "wav2vec2": (Wav2Vec2Config(**SMALL, conv_dim=(16,), conv_kernel=(8,), conv_stride=(4,)), None),
    "segformer": (SegformerConfig(hidden_sizes=[16, 16, 32, 32], decoder_hidden_size=32), None),
    "marian": (
        MarianConfig(vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
                     decoder_ffn_dim=64, encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=0),
        "shared",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_A_ROW)
def test_models_without_a_row_get_defaults(name):
    """Also those of sound and images, which have no embedding of tokens, and those whose embeddings are tied."""
    config, embedding = WITHOUT_A_ROW[name]
    model = AutoModel.from_config(config)
    embeddings = [n for n in select_layers(model, ComeraConfig()) if isinstance(model.get_submodule(n), nn.Embedding)]
    assert embeddings == ([] if embedding is None else [embedding])
    assert get_comera_model(model, ComeraConfig(rank=4)) is model
