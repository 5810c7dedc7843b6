"""hf_comera/memory/session.py: on every architecture gradients are equal to the last bit, and less is kept."""

import copy

import pytest
import torch
from transformers import AlbertConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, LEDConfig, LongformerConfig

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.memory import ActivationPolicy
from tests.architectures import ARCHITECTURES, SIZES, VOCABULARY, WORDS, Architecture, every_architecture
from tests.memory.policy_runs import EXACT, assert_same, run

RATES = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "embd_pdrop"),
    *("dropout", "attention_dropout", "activation_dropout", "dropout_rate"),
)
SETTINGS = [  # (dropout, attention, autocast)
    pytest.param(0.1, "sdpa", False, id="sdpa-dropout"),
    pytest.param(0.1, "eager", True, id="eager-dropout-bf16"),
    pytest.param(0.0, "sdpa", False, id="sdpa", marks=pytest.mark.slow),
    pytest.param(0.0, "eager", False, id="eager", marks=pytest.mark.slow),
    pytest.param(0.1, "eager", False, id="eager-dropout", marks=pytest.mark.slow),
    pytest.param(0.1, "sdpa", True, id="sdpa-dropout-bf16", marks=pytest.mark.slow),
]


def model_of(architecture, is_compressed, dropout, attention="sdpa"):
    """A model in training mode whose dropout has this rate everywhere."""
    config = architecture.new_config()
    for rate in RATES:
        if hasattr(config, rate):
            setattr(config, rate, dropout)
    config._attn_implementation = attention
    if is_compressed:
        return get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=config).train()
    return architecture.auto_class.from_config(config).train()


@pytest.mark.parametrize(("dropout", "attention", "autocast"), SETTINGS)
@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
@every_architecture
def test_equal_gradients_from_fewer_bytes(architecture, is_compressed, dropout, attention, autocast):
    model = model_of(architecture, is_compressed, dropout, attention)
    inputs = architecture.training_inputs()
    plain = run(model, inputs, None, autocast=autocast)
    for policy in EXACT.values():
        found = run(model, inputs, policy, autocast=autocast)
        assert_same(found, plain)
        assert found.saved_bytes < (0.75 if is_compressed else 0.95) * plain.saved_bytes


@pytest.mark.parametrize("policy", ["rank", ActivationPolicy(min_bytes=1024, depth=1)], ids=["default", "shallow"])
@every_architecture
def test_other_exact_policies(architecture, policy):
    model, inputs = model_of(architecture, True, 0.1), architecture.training_inputs()
    assert_same(run(model, inputs, policy), run(model, inputs, None))


@pytest.mark.parametrize("choice", ["products", "functions", "norms", "sums", "attention", "dropout"])
def test_each_choice_alone_can_be_left_out(choice):
    model, inputs = model_of(ARCHITECTURES["llama-tied"], True, 0.1), ARCHITECTURES["llama-tied"].training_inputs()
    plain = run(model, inputs, None)
    found = run(model, inputs, ActivationPolicy(min_bytes=0, **{choice: "keep"}))
    assert_same(found, plain)
    assert run(model, inputs, EXACT["scores"]).saved_bytes <= found.saved_bytes <= plain.saved_bytes


def test_layers_that_are_shared():
    albert = Architecture(AutoModelForMaskedLM, AlbertConfig(**SIZES, **WORDS, embedding_size=24), 0)
    model, inputs = model_of(albert, False, 0.1), albert.training_inputs()
    plain = run(model, inputs, None)
    for policy in EXACT.values():
        assert_same(run(model, inputs, policy), plain)


LONG = {
    "longformer": Architecture(
        AutoModelForMaskedLM, LongformerConfig(**SIZES, **WORDS, attention_window=[16, 16], pad_token_id=1), 0
    ),
    "led": Architecture(
        AutoModelForSeq2SeqLM,
        LEDConfig(
            **{"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "attention_window": [16]},
            **{"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, **WORDS},
        ),
        0,
    ),
}


@pytest.mark.parametrize("num_tokens", [9, 40])
@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
@pytest.mark.parametrize("architecture", LONG.values(), ids=LONG)
def test_attention_in_windows(architecture, is_compressed, num_tokens):
    """Lengths are divided there by ``torch.div``, which is given no tensor; the first fits into one window."""
    model, ids = model_of(architecture, is_compressed, 0.1, "eager"), torch.randint(2, VOCABULARY, (2, num_tokens))
    inputs = {"input_ids": ids, "labels": ids}
    plain = run(model, inputs, None)
    for policy in ("rank", *EXACT.values()):
        assert_same(run(model, inputs, policy), plain)


def test_frozen_parameters_and_embeddings_as_inputs():
    architecture = ARCHITECTURES["bert-mlm"]
    model, inputs = model_of(architecture, False, 0.1), architecture.training_inputs()
    model.requires_grad_(False)
    model.bert.encoder.layer[1].requires_grad_(True)
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    for needs_gradient in (False, True):
        given = {**inputs, "inputs_embeds": embedded.clone().requires_grad_(needs_gradient)}
        plain = run(model, given, None)
        for policy in EXACT.values():
            assert_same(run(model, given, policy), plain)
        assert (plain.gradients["inputs_embeds"] is not None) == needs_gradient


def test_a_padded_batch():
    architecture = ARCHITECTURES["bert-mlm"]
    model, inputs = model_of(architecture, True, 0.1), architecture.training_inputs()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 6:] = 0
    plain = run(model, copy.copy(inputs), None)
    for policy in EXACT.values():
        assert_same(run(model, copy.copy(inputs), policy), plain)
