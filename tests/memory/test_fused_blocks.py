"""hf_comera/memory with blocks: what autograd keeps of them, and that policies change no bit of their gradients."""

import pytest
import torch

from hf_comera.memory import SavedBytes
from hf_comera.modules.stamp import note_parameter_edit
from hf_comera.ops.kept_aside import hear_of_kept, stop_hearing
from tests.fused_models import inputs_of, model_of, unfused
from tests.memory.policy_runs import EXACT, assert_same, error, run
from tests.modules.conftest import small_chunks  # noqa: F401

HIDDEN, WIDE, HEADS, SIZE, LATENT = 48, 160, 4, 16, 8
BATCH, TOKENS = 3, 37
ROWS = BATCH * TOKENS
SIZES = {"hidden_size": HIDDEN, "intermediate_size": WIDE}
ROTARY = {**SIZES, "head_dim": SIZE}
GPT2 = {"n_embd": 64, "n_inner": WIDE}
BERT = {"hidden_size": 64, "intermediate_size": WIDE}


def saved_by(module, *args, **options):
    """Entries a token of what autograd keeps, most first, and of what is kept aside; no weights."""
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    saved, aside = {}, []

    def note(tensor):
        if tensor.untyped_storage()._cdata not in parameters:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hear_of_kept(aside.extend)
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = module(*args, **options)
    finally:
        stop_hearing(aside.extend)
    del y
    return [
        sorted(
            (each.untyped_storage().nbytes() / 4 / ROWS for each in kept if {TOKENS, ROWS} & {*each.shape}),
            reverse=True,
        )
        for kept in (saved.values(), aside)
    ]


def layer_of(name, **sizes):
    model = model_of(name, dtype=torch.float32, **sizes)
    body = model.base_model
    return body.h[0] if hasattr(body, "h") else body.layers[0] if hasattr(body, "layers") else body.encoder.layer[0]


def random_input(hidden):
    return torch.randn(BATCH, TOKENS, hidden, requires_grad=True)


def test_attention_of_gpt2_keeps_its_input_absorbed_queries_and_latents():
    entries, aside = saved_by(layer_of("gpt2", **GPT2).attn, random_input(64))
    assert entries[:3] == [64, HEADS * LATENT, HEADS * LATENT], (
        "input, and per head a query and a context of 8 numbers"
    )
    assert max(entries[3:]) <= 3 * LATENT
    assert aside == []


def test_a_layer_of_bert_keeps_no_query_key_context_or_hidden_layer():
    layer = layer_of("bert", **BERT)
    entries, _ = saved_by(layer, random_input(64))
    plain, _ = saved_by(unfused(layer), random_input(64))
    assert plain[0] == WIDE
    assert entries.count(64) == 4, "its input, that of the feed-forward block, and those of both norms' results"
    assert plain.count(64) >= 8
    assert entries[4:6] == [HEADS * LATENT] * 2
    assert max(entries[6:]) <= 3 * LATENT


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_of_llama_keeps_its_input_latents_and_what_attention_gave(name):
    angles = torch.rand(1, TOKENS, SIZE)
    options = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    entries, aside = saved_by(layer_of(name, **ROTARY).self_attn, random_input(HIDDEN), **options)
    assert entries[0] == HIDDEN
    assert entries[1] == HEADS * LATENT, "what each head makes of the values"
    assert max(entries[2:]) <= 3 * LATENT, "no query or key"
    assert aside == [HEADS * SIZE, HEADS], "the result, and the logarithms of its sums"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_cache_that_begins_changes_nothing_of_that(name):
    model, ids = model_of(name, dtype=torch.float32, **ROTARY), torch.randint(3, 99, (BATCH, TOKENS))
    saved = []
    for use_cache in (True, False):
        note_parameter_edit()  # as after a step: halves are built, and what they keep is counted
        with SavedBytes(model.parameters()) as bytes_of:
            loss = model(ids, labels=ids, use_cache=use_cache).loss
        saved.append(bytes_of.total)
        del loss
    assert saved[0] == saved[1]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_feed_forward_blocks_keep_their_input_and_latents(name):
    hidden = {"llama": HIDDEN, "gpt2": 64}[name]
    layer = layer_of(name, **(ROTARY if name == "llama" else GPT2))
    entries, aside = saved_by(layer.mlp, random_input(hidden))
    assert entries[0] == hidden
    assert max(entries[1:]) <= 3 * LATENT
    assert aside == []


RUNS = [
    *((name, rate) for name in ("bert", "gpt2", "llama", "t5-gated", "opt", "qwen3") for rate in (0.0, 0.1)),
    ("vit", 0.1),
]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize(("name", "rate"), RUNS)
def test_policies_change_no_bit(name, rate, policy):
    model, inputs = model_of(name, dropout=rate, dtype=torch.float32), inputs_of(name, dtype=torch.float32)
    plain = run(model, inputs, None)
    found = run(model, inputs, policy)
    assert_same(found, plain)
    assert found.saved_bytes <= plain.saved_bytes


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_blocks_keep_less_with_and_without_a_policy(name, rate):
    model = model_of(name, dropout=rate, dtype=torch.float32, hidden_size=64, intermediate_size=512, head_dim=16)
    ids = torch.randint(3, 99, (8, 60))
    inputs = {"input_ids": ids, "labels": ids}
    plain, without = run(model, inputs, None), run(unfused(model), inputs, None)
    assert plain.saved_bytes < 0.6 * without.saved_bytes
    less = run(unfused(model), inputs, "rank")
    found = run(model, inputs, "rank")
    assert_same(found, plain)
    assert found.saved_bytes < 1.1 * less.saved_bytes
    assert error(run(model, inputs, "rank+fp8"), plain) < 0.1
