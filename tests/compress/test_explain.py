"""hf_comera/compress/explain.py: a row for each family of layers, costs of what runs, what is in the way."""

import shutil

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, OPTConfig

from hf_comera import ComeraConfig, explain, get_comera_model
from hf_comera.compress.explain import WIDTH
from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.modules.fast_dropout import FastDropout
from hf_comera.tt.planner import RULE
from tests.architectures import ARCHITECTURES, SIZES, WORDS

# kinds of layers that are equal to each other: count, the last parts of their names
FAMILIES = {
    "bert-mlm": {
        1: ["embeddings.word_embeddings"],
        8: ["self.query, self.key, self.value, output.dense"],
        2: ["intermediate.dense", "output.dense"],
    },
    "gpt2": {1: ["transformer.wte"], 2: ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]},
    "llama-tied": {
        1: ["model.embed_tokens"],
        4: ["self_attn.q_proj, self_attn.o_proj", "self_attn.k_proj, self_attn.v_proj", "mlp.gate_proj, mlp.up_proj"],
        2: ["mlp.down_proj"],
    },
}


def compressed(name, **settings):
    architecture = ARCHITECTURES[name]
    return get_comera_model(
        architecture.auto_class, ComeraConfig(**{"rank": 4} | settings), config=architecture.new_config()
    )


def notes(model, **settings):
    return " ".join(explain(model, 2, 9, **settings).notes)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_there_is_a_row_for_each_family_and_all_of_it_is_printed(name, training):
    explanation = explain(compressed(name), 2, 9, training=training)
    assert sum(row.count for row in explanation.rows) == ARCHITECTURES[name].num_layers
    found = {(row.count, label) for row in explanation.rows for label in (row.label, *row.label.split(", "))}
    for count, labels in FAMILIES[name].items():
        assert {(count, label) for label in labels} <= found
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert f"FLOPs of all linear layers: {explanation.flops_ratio:.1f}x less." in " ".join(text.split())
    assert RULE in " ".join(text.split())
    for row in explanation.rows:
        counts = row.flops, row.dense_flops, row.bytes, row.dense_bytes
        assert (min(counts) > 0, max(counts) > 0) == (row.path == "low-rank", row.path != "lookup")


def test_flops_are_those_of_the_path_and_of_the_dense_layer():
    layer, dense = TTLinear(24, 30, ranks=8), nn.Linear(24, 30)
    x = torch.randn(18, 24, requires_grad=True)
    (row,) = explain(nn.ModuleDict({"one": layer}), 2, 9).rows
    with FlopCounterMode(display=False) as counter:
        dense(x).sum().backward()
    assert row.dense_flops == counter.get_total_flops()
    assert (row.path, row.label) == ("low-rank", "one")
    small, large = (explain(nn.ModuleDict({"one": layer}), 2, n).rows[0] for n in (9, 90))
    assert large.dense_flops == 10 * small.dense_flops
    assert large.flops < 10 * small.flops, "cores are contracted once, however many rows there are"


@pytest.mark.parametrize("ranks", [8, 24])
def test_what_is_kept_in_evaluation_is_not_counted(ranks):
    layer = TTLinear(24, 30, ranks=ranks)
    (row,) = explain(nn.ModuleDict({"one": layer}), 2, 9, training=False).rows
    with torch.no_grad():
        layer(torch.randn(18, 24))
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(18, 24))
    assert row.flops == counter.get_total_flops()


def test_removed_layers_cost_nothing():
    model = nn.ModuleDict({"a": TTLinear(12, 12, ranks=(0,) * 5), "b": TTMEmbedding(57, 11, ranks=(0, 0, 0))})
    for row in explain(model, 2, 9).rows:
        assert (row.path, row.flops, row.bytes) == ("removed", 0, 0)


def test_large_ranks_are_told_to_go_dense():
    settings = {"in_factors": (12, 8, 8), "out_factors": (8, 8, 12), "ranks": 768, "device": "meta"}
    explanation = explain(nn.ModuleDict({"query": TTLinear(768, 768, **settings)}), 32, 128)
    assert [row.path for row in explanation.rows] == ["dense"]
    assert "is the fastest way: query. At these ranks" in " ".join(explanation.notes)


def test_what_is_too_small_is_named():
    model = nn.ModuleDict({"query": TTLinear(768, 768, ranks=200, device="meta")})
    assert "More FLOPs than dense: query. There are too few rows" in notes(model)
    assert "More FLOPs" not in notes(model, training=False)
    assert "More FLOPs" not in " ".join(explain(model, 32, 128).notes)


def test_notes_on_the_machine(monkeypatch):
    model = compressed("bert-mlm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name, **options: None)
    assert "No GPU" in notes(model)
    assert "No nvcc found" in notes(model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name, **options: f"/usr/bin/{name}")
    assert "A GPU is there, but the model is on 'cpu'" in notes(model)
    assert "nvcc" not in notes(model)


def test_notes_on_the_dtype():
    model = nn.ModuleDict({"query": TTLinear(48, 48, dtype=torch.float64)})
    assert "twice the bytes of float32" in notes(model)
    assert "twice the bytes of float32" not in notes(model.float())


def test_autocast_decides_the_dtype():
    model = nn.ModuleDict({"query": TTLinear(64, 64, ranks=8)})
    plain = explain(model, 2, 9, training=False).rows[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halved = explain(model, 2, 9, training=False).rows[0]
    assert (2 * halved.bytes, 2 * halved.dense_bytes) == (plain.bytes, plain.dense_bytes)


def test_tied_heads_and_dense_models_are_said_to_be_missing():
    assert "Not in the table: cls.predictions.decoder" in notes(compressed("bert-mlm"))
    dense = explain(nn.Linear(3, 3), 2, 9)
    assert (dense.rows, dense.flops_ratio) == ((), None)
    assert "No layer is in tensor-train form" in str(dense)


@pytest.mark.parametrize("sizes", [(0, 9), (2, -1)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match="must be at least 1, for example explain"):
        explain(nn.Linear(3, 3), *sizes)


def test_the_block_of_each_layer_is_told():
    rows = {row.label: row.extra for row in explain(compressed("bert-mlm"), 2, 9).rows}
    assert set(rows.values()) == {"", "latent attention", "a tiled MLP"}
    assert rows["intermediate.dense"] == "a tiled MLP"
    assert next(extra for label, extra in rows.items() if "self.query" in label) == "latent attention"
    llama = {row.label: row.extra for row in explain(compressed("llama-tied"), 2, 9).rows}
    assert llama["mlp.gate_proj, mlp.up_proj"] == "a tiled MLP"
    assert "never write their output" in notes(compressed("bert-mlm"))
    assert "never write their output" not in notes(compressed("t5", target_modules=["q"]))


@pytest.mark.parametrize(("config", "latents"), [(GPT2Config, 32), (OPTConfig, 32)])
def test_what_a_token_takes_in_caches_is_told(config, latents):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 241}
    more = {"ffn_dim": 96, "word_embed_proj_dim": 48} if config is OPTConfig else {}
    model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=7), config=config(**sizes, **more))
    assert f"2 attention layers cache {latents} numbers a token instead of 192" in notes(model)
    assert " cache " not in notes(compressed("bert-mlm"))


def test_why_a_block_is_off_is_told():
    assert "do without" not in notes(compressed("bert-mlm"))
    model = compressed("bert-mlm")
    model.config._attn_implementation = "flash_attention_2"
    assert "2 of 2 modules do without latent attention: its attention is 'flash_attention_2'" in notes(model)
    model = compressed("vit")
    hook = model.get_submodule("vit.layers.0.attention.q_proj").register_forward_hook(print)
    assert "1 of 2 modules do without latent attention: a hook watches" in notes(model)
    hook.remove()
    model = compressed("roberta", rank=12)
    assert "a latent with its bias has 16 numbers and a head 12: the rank would have to be lower" in notes(model)
    model = compressed("t5")
    assert "no block serves compute alone" in notes(model)


def test_how_dropout_draws_is_told():
    model = compressed("bert-mlm")
    count = sum(type(module) is FastDropout for module in model.modules())
    assert count > 0
    for device in ("cpu", "meta"):
        assert f"Training, {count} dropouts draw four entries at a time" in notes(model.to(device))
    next(module for module in model.modules() if type(module) is FastDropout).__class__ = nn.Dropout
    assert "1 dropouts draw one entry at a time, in one thread" in notes(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert "dropouts" not in notes(model)


def test_layers_of_equal_names_and_unequal_ranks_are_told_apart():
    model = compressed("bert-mlm")
    layer = model.get_submodule("bert.encoder.layer.1.output.dense")
    layer.load_cores(
        [
            core[..., :3] if place == 0 else core[:3] if place == 1 else core
            for place, core in enumerate(core.detach() for core in layer.cores())
        ]
    )
    labels = [row.label for row in explain(model, 2, 9).rows]
    assert len(set(labels)) == len(labels)
    assert {"bert.encoder.layer.0.output.dense", "bert.encoder.layer.1.output.dense"} <= set(labels)
    assert "intermediate.dense" in labels


def test_layers_that_a_block_leaves_alone_have_a_row_of_their_own():
    model = compressed("bert-mlm")
    model.get_submodule("bert.encoder.layer.1.attention.self.query").register_forward_hook(lambda *_: None)
    queries = {row.label: row.extra for row in explain(model, 2, 9).rows if "self.query" in row.label}
    assert sorted(queries.values()) == ["", "latent attention"]


def test_what_becomes_of_the_logits_is_told_where_they_are_all_made():
    config = Gemma2Config(**SIZES, **WORDS, head_dim=12, num_key_value_heads=2)
    gemma = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=4), config=config)
    found = " ".join(explain(gemma, batch_size=2, seq_len=9).notes)
    assert "All logits exist while it trains, also of tokens without a label: its logits are not" in found
    architecture = ARCHITECTURES["gpt2"]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    assert "logits" not in " ".join(explain(model, batch_size=2, seq_len=9).notes)
    model.set_head_and_loss(False)
    found = " ".join(explain(model, batch_size=2, seq_len=9).notes)
    assert "set_head_and_loss(model) computes logits for labelled tokens only" in found
