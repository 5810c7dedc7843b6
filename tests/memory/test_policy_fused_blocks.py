"""hf_comera/memory with blocks: what autograd keeps of them, and that policies change no bit of their gradients."""

import pytest
import torch

from hf_comera.memory import SavedBytes
from hf_comera.modules.halves_cache import note_parameter_edit
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


def kept_by(module, *args, **options):
    """Numbers a token of what a forward pass makes and keeps, most first; its result and weights are left out."""
    with SavedBytes() as saved:
        y = module(*args, **options)
    y = y if isinstance(y, torch.Tensor) else y[0]
    storages = [storage for reference in saved._storages.values() if (storage := reference()) is not None]
    sizes = [each.nbytes() / 4 / ROWS for each in storages if each._cdata != y.untyped_storage()._cdata]
    return sorted((int(size) for size in sizes if size == int(size)), reverse=True)  # no weight has 37 of anything


def layer_of(name, **sizes):
    model = model_of(name, dtype=torch.float32, **sizes)
    body = model.base_model
    return body.h[0] if hasattr(body, "h") else body.layers[0] if hasattr(body, "layers") else body.encoder.layer[0]


def random_input(hidden):
    return torch.randn(BATCH, TOKENS, hidden, requires_grad=True)


def test_attention_of_gpt2_keeps_absorbed_queries_and_contexts_of_heads_and_a_latent():
    kept = kept_by(layer_of("gpt2", **GPT2).attn, random_input(64))
    assert kept[:3] == [HEADS * LATENT, HEADS * LATENT, LATENT]
    assert sum(kept) < 3 * HEADS * LATENT


def test_a_layer_of_bert_keeps_no_query_key_context_or_hidden_layer():
    layer = layer_of("bert", **BERT)
    kept, plain = (kept_by(each, random_input(64)) for each in (layer, unfused(layer)))
    assert plain[0] == WIDE
    assert plain.count(64) >= 7
    assert kept.count(64) == 3, "both sums that are normalized, and the input of the feed-forward block"
    assert kept[3:5] == [HEADS * LATENT] * 2
    assert kept[5] == 3 * LATENT, "of query, key and value, side by side"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_of_llama_keeps_what_attention_gave_and_latents(name):
    angles = torch.rand(1, TOKENS, SIZE)
    options = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    kept = kept_by(layer_of(name, **ROTARY).self_attn, random_input(HIDDEN), **options)
    assert kept[0] == HEADS * SIZE, "what attention gave, values as wide as keys"
    assert kept[1] == HEADS * LATENT, "of which the numbers of values are used"
    assert max(kept[2:]) == 3 * LATENT, "no query or key"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_cache_that_begins_changes_nothing_of_that(name):
    model, ids = model_of(name, dtype=torch.float32, **ROTARY), torch.randint(3, 99, (BATCH, TOKENS))
    kept = []
    for use_cache in (False, True, False):
        note_parameter_edit()  # as after a step: halves are built
        with SavedBytes() as saved:
            loss = model(ids, labels=ids, use_cache=use_cache).loss
        kept.append(saved.total)
        del loss
    assert kept[1] == kept[2]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_feed_forward_blocks_keep_latents(name):
    layer = layer_of(name, **(ROTARY if name == "llama" else GPT2))
    kept = kept_by(layer.mlp, random_input({"llama": HIDDEN, "gpt2": 64}[name]))
    assert max(kept) <= 2 * LATENT
    assert sum(kept) < 5 * LATENT


RUNS = [
    *((name, rate) for name in ("bert", "gpt2", "llama", "t5-gated", "opt", "qwen3") for rate in (0.0, 0.1)),
    ("vit", 0.1),
]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize(("name", "rate"), RUNS)
def test_policies_change_no_bit(name, rate, policy):
    model, inputs = model_of(name, dropout=rate, dtype=torch.float32), inputs_of(name, dtype=torch.float32)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    plain = run(model, inputs, None)
    assert_same(run(model, inputs, policy), plain)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_blocks_keep_less_with_and_without_a_policy(name, rate):
    model = model_of(name, dropout=rate, dtype=torch.float32, hidden_size=64, intermediate_size=512, head_dim=16)
    model.config.use_cache = False
    ids = torch.randint(3, 99, (8, 60))
    inputs = {"input_ids": ids, "labels": ids}
    plain, without = run(model, inputs, None), run(unfused(model), inputs, None)
    assert plain.saved_bytes < 0.6 * without.saved_bytes
    found = run(model, inputs, "rank")
    assert_same(found, plain)
    assert found.saved_bytes <= plain.saved_bytes
    assert error(run(model, inputs, "rank+fp8"), plain) < 0.1
