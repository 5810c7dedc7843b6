"""hf_comera/memory/policy.py: the same gradients from fewer bytes, on every architecture."""

import copy
import gc

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, LEDConfig, LongformerConfig

from hf_comera.memory import ActivationPolicy, SavedBytes, set_activation_policy
from hf_comera.ops.fused_loss import fixed_shapes
from tests.architectures import ARCHITECTURES, SIZES, VOCABULARY, WORDS, Architecture, every_architecture
from tests.memory.policy_runs import (
    EXACT,
    ROUNDED,
    assert_nothing_left,
    assert_same,
    draw_as_a_gpu,
    error,
    model_of,
    run,
)

SETTINGS = [  # (dropout, attention, autocast)
    pytest.param(0.1, "sdpa", False, id="sdpa-dropout"),
    pytest.param(0.0, "sdpa", False, id="sdpa"),
    pytest.param(0.1, "eager", True, id="eager-dropout-bf16"),
    pytest.param(0.1, "sdpa", True, id="sdpa-dropout-bf16", marks=pytest.mark.slow),
    pytest.param(0.1, "eager", False, id="eager-dropout", marks=pytest.mark.slow),
]
BERT = ARCHITECTURES["bert-mlm"]


@pytest.fixture
def fast_dropout(monkeypatch):
    """Tensors of any size are dropped in bits."""
    monkeypatch.setattr("hf_comera.ops.bit_dropout.MIN_NUMEL", 1)


@pytest.mark.parametrize(("dropout", "attention", "autocast"), SETTINGS)
@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
@every_architecture
def test_equal_gradients_from_fewer_bytes(architecture, is_compressed, dropout, attention, autocast):
    model, inputs = model_of(architecture, is_compressed, dropout, attention), architecture.training_inputs()
    plain = run(model, inputs, None, autocast=autocast)
    for policy in EXACT.values():
        found = run(model, inputs, policy, autocast=autocast)
        assert_same(found, plain)
        assert found.saved_bytes < plain.saved_bytes


@pytest.mark.usefixtures("fast_dropout")
@pytest.mark.parametrize("row", ["bert-mlm", "gpt2", "t5", "llama-tied", "distilbert"])
def test_masks_in_bits_are_the_same_in_backward(row):
    architecture = ARCHITECTURES[row]
    model, inputs = model_of(architecture, True, 0.1), architecture.training_inputs()
    plain = run(model, inputs, None)
    for policy in EXACT.values():
        assert_same(run(model, inputs, policy), plain)


def test_draws_of_both_kinds_in_one_layer(monkeypatch):
    """Large tensors in bits that are kept, small ones in torch's way that are drawn again."""
    monkeypatch.setattr("hf_comera.ops.bit_dropout.MIN_NUMEL", 2 * 9 * 48 + 1)
    model, inputs = model_of(BERT, True, 0.1), BERT.training_inputs()
    plain = run(model, inputs, None)
    for policy in EXACT.values():
        assert_same(run(model, inputs, policy), plain)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
@every_architecture
def test_fp8_rounds_gradients_and_not_the_loss(architecture, is_compressed, autocast):
    model, inputs = model_of(architecture, is_compressed, 0.1), architecture.training_inputs()
    plain = run(model, inputs, None, autocast=autocast)
    for policy in ROUNDED.values():
        found = run(model, inputs, policy, autocast=autocast)
        assert torch.equal(found.loss, plain.loss)
        assert 0 < error(found, plain) < 0.1


SIZE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}
BARS = {  # policy: most bytes by those without a policy, with and without dropout; compressed, dense
    "rank": (0.45, 0.75),
    "rank+fp8": (0.3, 0.3),
    "fp8": (0.6, 0.75),
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
def test_bytes_of_a_model_of_some_size(is_compressed, dropout):
    architecture = ARCHITECTURES["bert-classifier"]
    model = model_of(architecture, is_compressed, dropout, **SIZE)
    inputs = {"input_ids": torch.randint(2, VOCABULARY, (16, 64)), "labels": torch.randint(0, 2, (16,))}
    plain = run(model, inputs, None)
    for policy, bars in BARS.items():
        found = run(model, inputs, policy)
        assert found.saved_bytes < bars[not is_compressed] * plain.saved_bytes, policy
        assert error(found, plain) < 0.1


def test_small_tensors_stay_exact():
    model, inputs = model_of(BERT, True, 0.1), BERT.training_inputs()
    assert_same(run(model, inputs, "fp8"), run(model, inputs, None))
    assert_same(run(model, inputs, "rank+fp8"), run(model, inputs, None))


def test_layers_that_are_shared():
    """Also under autocast, which keeps casts of weights for their second use."""
    for is_compressed in (False, True):
        model, inputs = model_of(BERT, is_compressed, 0.1), BERT.training_inputs()
        model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
        for autocast in (False, True):
            plain = run(model, inputs, None, autocast=autocast)
            for policy in EXACT.values():
                found = run(model, inputs, policy, autocast=autocast)
                # gradients of a cast that two layers share are added up in bf16
                assert_same(found, plain) if not autocast else None
                assert error(found, plain) < 1e-2


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
    model, ids = model_of(architecture, is_compressed, 0.1, "eager"), torch.randint(2, VOCABULARY, (2, num_tokens))
    inputs = {"input_ids": ids, "labels": ids}
    plain = run(model, inputs, None)
    for policy in EXACT.values():
        assert_same(run(model, inputs, policy), plain)
    for policy in ROUNDED.values():
        assert error(run(model, inputs, policy), plain) < 0.1


@pytest.mark.parametrize("policy", [*EXACT.values(), *ROUNDED.values()], ids=[*EXACT, *ROUNDED])
@pytest.mark.parametrize("row", ["bert-mlm", "t5"])
def test_a_padded_batch(row, policy):
    architecture = ARCHITECTURES[row]
    for attention in ("eager", "sdpa"):
        model, inputs = model_of(architecture, row == "bert-mlm", 0.1, attention), architecture.training_inputs()
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, 6:] = 0
        plain, found = (run(model, copy.copy(inputs), each) for each in (None, policy))
        assert error(found, plain) < (0.1 if policy.storage == "fp8" else 1e-30)


def test_frozen_parameters_and_embeddings_as_inputs():
    model, inputs = model_of(BERT, False, 0.1), BERT.training_inputs()
    model.requires_grad_(False)
    model.bert.encoder.layer[1].requires_grad_(True)
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    for needs_gradient in (False, True):
        given = {**inputs, "inputs_embeds": embedded.clone().requires_grad_(needs_gradient)}
        plain = run(model, given, None)
        for policy in EXACT.values():
            assert_same(run(model, given, policy), plain)
        assert (plain.gradients["inputs_embeds"] is not None) == needs_gradient


UNRECORDED = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("policy", ["rank", "rank+fp8", "fp8"])
@pytest.mark.parametrize("context", UNRECORDED.values(), ids=UNRECORDED)
def test_nothing_happens_without_gradients(context, policy):
    model, inputs = model_of(ARCHITECTURES["gpt2"], True, 0.0), ARCHITECTURES["gpt2"].training_inputs()
    model.eval()
    expected = model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False)
    model.train()
    with context():
        logits = model(**inputs).logits
        set_activation_policy(model, policy)
        assert torch.equal(model(**inputs).logits, logits)
    model.eval()
    assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False), expected)


@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt(), SystemExit()], ids=repr)
@pytest.mark.parametrize("policy", ["rank", "rank+fp8", "fp8"])
def test_a_forward_that_raised_leaves_nothing_behind(policy, error):
    model, inputs = model_of(BERT, True, 0.1), BERT.training_inputs()
    plain = run(model, inputs, None)
    set_activation_policy(model, policy)

    def fail(module, args):
        raise error

    handle = model.bert.encoder.layer[1].attention.register_forward_pre_hook(fail)
    for _ in range(3):
        with pytest.raises(type(error)):
            model(**inputs)
        assert_nothing_left()
    handle.remove()
    assert_same(run(model, inputs, "rank"), plain)


@pytest.mark.parametrize("policy", ["rank", *ROUNDED.values()], ids=["rank", *ROUNDED])
def test_backward_may_pass_again(policy):
    model, inputs = model_of(BERT, True, 0.1), BERT.training_inputs()
    set_activation_policy(model, policy)
    loss = model(**inputs).loss
    found = []
    for retain in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        found.append([parameter.grad for parameter in model.parameters()])
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))


def test_what_was_kept_exact_may_not_be_written_to():
    model, inputs = model_of(BERT, False, 0.0), BERT.training_inputs()
    set_activation_policy(model, ActivationPolicy(recompute=False, storage="fp8"))
    loss = model(**inputs).loss
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.add_(1)
    with pytest.raises(RuntimeError, match="was modified in place"):
        loss.backward()


def test_in_recorded_steps_draws_are_kept(monkeypatch):
    """A graph cannot set generators back: what a GPU's dropout draws is kept there, and not drawn again."""
    draw_as_a_gpu(monkeypatch)
    model, inputs = model_of(BERT, False, 0.1, "eager"), BERT.training_inputs()
    with fixed_shapes():
        plain = run(model, inputs, None)
        set_state, states = torch.set_rng_state, []
        monkeypatch.setattr(torch, "set_rng_state", lambda state: states.append(state) or set_state(state))
        for policy in EXACT.values():
            assert_same(run(model, inputs, policy), plain)
    assert not states


def test_recorded_steps_refuse_draws_that_cannot_be_kept():
    model, inputs = model_of(BERT, False, 0.1, "eager"), BERT.training_inputs()
    set_activation_policy(model, "rank")
    with fixed_shapes(), pytest.raises(ValueError, match=r"aten.bernoulli_.* set dropout to 0"):
        model(**inputs)


@pytest.mark.parametrize("policy", ["rank", "rank+fp8", "fp8"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
@pytest.mark.parametrize("row", ["bert-classifier", "llama-tied"])
def test_compiled(row, is_compressed, backend, policy):
    architecture = ARCHITECTURES[row]
    torch._dynamo.reset()
    model, inputs = model_of(architecture, is_compressed, 0.0, use_cache=False), architecture.training_inputs()
    plain = run(model, inputs, None)
    set_activation_policy(model, policy)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    model.zero_grad()
    if policy == "rank":
        loss = compiled(**inputs).loss
    else:
        with pytest.warns(UserWarning, match="FP8 storage of activations has no effect in compiled code"):
            loss = compiled(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), plain.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["keep", "rank", *ROUNDED.values()], ids=["keep", "rank", *ROUNDED])
def test_backward_frees_what_was_kept_without_the_garbage_collector(policy):
    model, inputs = model_of(BERT, False, 0.1, hidden_size=128), BERT.training_inputs()
    set_activation_policy(model, policy)
    model(**inputs).loss.backward()
    gc.collect()
    gc.disable()
    try:
        with SavedBytes() as saved:
            loss = model(**inputs).loss
            kept = saved.now
            loss.backward()
            model.zero_grad()
            del loss
        assert saved.total < 0.02 * kept
    finally:
        gc.enable()
