"""hf_comera/compress/reports.py: a model that stays mostly dense says so when it is made, with parts and reasons."""

import logging

import pytest
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    MixtralConfig,
)

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.compress.reports import dense_parts

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
MIXTRAL = MixtralConfig(**SMALL, num_key_value_heads=2, vocab_size=64, num_local_experts=8, num_experts_per_tok=2)
GEMMA = Gemma3TextConfig(
    **SMALL, num_key_value_heads=2, head_dim=8, vocab_size=1024, layer_types=["full_attention"] * 2
)

EXPERTS = "model.layers.*.mlp.experts.gate_up_proj (3 dimensions, in MixtralExperts)"
SCALED = "model.embed_tokens.weight (Gemma3TextScaledWordEmbedding, which may compute more than Embedding)"
CHOSEN = "transformer.wte.weight (Embedding that is not targeted)"

MOSTLY_DENSE = {
    "experts": (MIXTRAL, {}, EXPERTS),
    "scaled embedding": (GEMMA, {}, SCALED),
    "few targets": (GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=500), {"target_modules": ["c_fc"]}, CHOSEN),
}


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "compressed layers" in record.getMessage()]


@pytest.mark.parametrize(("config", "settings", "part"), MOSTLY_DENSE.values(), ids=MOSTLY_DENSE)
def test_a_model_that_stays_mostly_dense_says_so_however_it_is_made(config, settings, part, caplog, tmp_path):
    caplog.set_level(logging.WARNING)
    model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=4, **settings), config=config)
    (message,) = warnings_of(caplog)
    assert part in message
    assert f"parameters of {type(model).__name__}" in message

    caplog.clear()
    dense = AutoModelForCausalLM.from_config(config)
    dense.save_pretrained(tmp_path / "dense")
    get_comera_model(dense, ComeraConfig(rank=4, **settings))
    assert len(warnings_of(caplog)) == 1

    caplog.clear()
    AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=ComeraConfig(rank=4, **settings))
    assert len(warnings_of(caplog)) == 1

    caplog.clear()
    model.save_pretrained(tmp_path / "compressed")
    AutoModelForCausalLM.from_pretrained(tmp_path / "compressed")
    assert warnings_of(caplog) == []  # it was said when the model was made


def test_a_model_that_is_mostly_compressed_says_nothing(caplog):
    config = BertConfig(**SMALL, vocab_size=2000)
    get_comera_model(AutoModel, ComeraConfig(rank=4), config=config)
    assert warnings_of(caplog) == []


def test_parts_gather_layers_and_count_shared_parameters_once():
    stack = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.LayerNorm(5)) for _ in range(3)])
    stack.append(stack[0])
    assert [(part.pattern, part.parameters, part.reason) for part in dense_parts(stack)] == [
        ("*.*.weight", 3 * 48, "4 dimensions, in Conv2d"),
        ("*.*.weight", 3 * 5, "in LayerNorm"),
        ("*.*.bias", 3 * 5, "in LayerNorm"),
    ]


def test_cores_are_no_dense_part():
    model = get_comera_model(AutoModel, ComeraConfig(rank=4), config=BertConfig(**SMALL, vocab_size=2000))
    assert not any("core_" in part.pattern for part in dense_parts(model))
