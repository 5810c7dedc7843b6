"""hf_comera/modules/fusion.py: which modules become blocks, which stay as they are, and what the reasons are."""

import importlib

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BartConfig, GPT2Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from hf_comera import ComeraConfig, get_comera_model, set_fp8_linears
from hf_comera.modules import TTLinear
from hf_comera.modules.block import Block, text_digest
from hf_comera.modules.fast_dropout import FastDropout
from hf_comera.modules.fusion import block_of, fuse, unfuse
from hf_comera.modules.latent_attention import (
    ATTENTIONS,
    WRAPPERS,
    LatentAttention,
    LatentAttentionWithOutput,
    attention_block,
)
from hf_comera.modules.tiled_mlp import FORWARDS, PARTS, TiledChunk, TiledLayer, TiledMLP
from tests.fused_models import FUSED, blocks_that_run, inputs_of, model_of, results, unfused

SERVED = {  # block: classes of Transformers whose forwards are in its table, at least one a row
    LatentAttention: (
        "bert.BertSelfAttention",
        "roberta.RobertaSelfAttention",
        "xlm_roberta.XLMRobertaSelfAttention",
        "camembert.CamembertSelfAttention",
        "electra.ElectraSelfAttention",
        "ernie.ErnieSelfAttention",
        "distilbert.DistilBertSelfAttention",
        "layoutlm.LayoutLMSelfAttention",
        "vit.ViTAttention",
        "deit.DeiTAttention",
        "dinov2.Dinov2Attention",
        "siglip.SiglipAttention",
        "clip.CLIPAttention",
        "gpt2.GPT2Attention",
        "opt.OPTAttention",
        "llama.LlamaAttention",
        "gemma.GemmaAttention",
        "mistral.MistralAttention",
        "qwen2.Qwen2Attention",
        "qwen3.Qwen3Attention",
        "phi3.Phi3Attention",
    ),
    LatentAttentionWithOutput: (
        "bert.BertAttention",
        "roberta.RobertaAttention",
        "xlm_roberta.XLMRobertaAttention",
        "camembert.CamembertAttention",
        "electra.ElectraAttention",
        "ernie.ErnieAttention",
        "layoutlm.LayoutLMAttention",
    ),
    TiledMLP: (
        "llama.LlamaMLP",
        "mistral.MistralMLP",
        "qwen2.Qwen2MLP",
        "qwen3.Qwen3MLP",
        "gemma.GemmaMLP",
        "qwen2_5_vl.Qwen2_5_VLMLP",
        "t5gemma.T5GemmaMLP",
        "phi3.Phi3MLP",
        "clip.CLIPMLP",
        "siglip.SiglipMLP",
        "vit.ViTMLP",
        "qwen2_vl.VisionMlp",
        "qwen3_vl.Qwen3VLVisionMLP",
        "nemotron.NemotronMLP",
        "sam.SamMLPBlock",
        "gpt_neox.GPTNeoXMLP",
        "gpt2.GPT2MLP",
        "gptj.GPTJMLP",
        "wav2vec2.Wav2Vec2FeedForward",
        "t5.T5DenseActDense",
        "t5.T5DenseGatedActDense",
        "longt5.LongT5DenseGatedActDense",
    ),
    TiledChunk: ("distilbert.FFN",),
    TiledLayer: ("bert.BertLayer", "roberta.RobertaLayer", "electra.ElectraLayer", "layoutlm.LayoutLMLayer"),
}
TABLES = {LatentAttention: ATTENTIONS, LatentAttentionWithOutput: WRAPPERS, TiledMLP: FORWARDS, TiledChunk: PARTS}


def class_of(name):
    folder, class_name = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), class_name)


@pytest.mark.parametrize(("block", "name"), [(block, name) for block, names in SERVED.items() for name in names])
def test_classes_of_the_installed_transformers_are_served(block, name):
    assert block.row(class_of(name)) is not None, f"the text of {name} has changed: read it, and mend its row"


@pytest.mark.parametrize(("block", "table"), TABLES.items(), ids=lambda part: getattr(part, "__name__", ""))
def test_every_row_has_a_class(block, table):
    method = "ff_chunk" if block is TiledChunk else "forward"
    digests = {text_digest(getattr(class_of(name), method)) for name in SERVED[block]}
    assert digests == set(table), "a row of a text that the installed Transformers has nowhere, or none for a class"


@pytest.mark.parametrize("name", FUSED)
def test_what_becomes_a_block(name):
    model = model_of(name)
    assert blocks_that_run(model) == (FUSED[name].attentions, FUSED[name].forwards)
    plain = unfused(model)
    assert not any(isinstance(module, (Block, FastDropout)) for module in plain.modules())
    for module, ours in zip(plain.modules(), model.modules(), strict=True):
        has_layers = any(isinstance(part, TTLinear) for part in module.modules())
        assert isinstance(ours, Block) == (block_of(module) is not None and has_layers)
    fuse(plain)
    assert blocks_that_run(plain) == blocks_that_run(model)


def test_all_layers_share_one_cache_and_dropout_is_fast():
    model = model_of("bert", dropout=0.1)
    assert len({layer.halves_cache for layer in model.modules() if isinstance(layer, TTLinear)}) == 1
    assert {type(module) for module in model.modules() if isinstance(module, nn.Dropout)} == {FastDropout}
    unfuse(model)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Dropout)} == {nn.Dropout}


def test_fusing_again_takes_the_layers_that_are_there_then():
    model = model_of("gpt2")
    for block in model.transformer.h:
        block.mlp.c_fc, block.mlp.c_proj = nn.Linear(32, 128), nn.Linear(128, 32)
    fuse(model)
    assert [type(block.mlp).__name__ for block in model.transformer.h] == ["GPT2MLP"] * 2
    assert not any(isinstance(block.mlp, Block) for block in model.transformer.h)
    assert all(isinstance(block.attn, Block) for block in model.transformer.h)


def test_a_class_of_somebody_else_of_the_same_name_is_none_of_ours():
    class LlamaMLP(nn.Module):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))

    assert block_of(LlamaMLP()) is None
    assert attention_block(nn.Linear(4, 4)) is None


class _Llama(LlamaAttention):
    """A user's class that changes nothing."""


class _OtherForward(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


def test_derived_classes_are_served_if_they_do_not_change_the_forward():
    model = model_of("llama")
    unfuse(model)
    for layer in model.model.layers:
        layer.self_attn.__class__, layer.mlp.__class__ = _Llama, _OtherForward
    fuse(model)
    assert blocks_that_run(model) == (2, 0)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found, expected = (results(each, INPUTS) for each in (model, unfused(model)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


INPUTS = inputs_of("llama")


def hook_on_a_layer(model):
    next(layer for layer in model.modules() if isinstance(layer, TTLinear)).register_forward_hook(lambda *args: None)
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "query", "c_attn", "up_proj", "c_fc", "intermediate.dense")):
            module.register_forward_hook(lambda *args: None)


def offloaded(model):
    for module in model.modules():
        if isinstance(module, TTLinear):
            module._hf_hook = object()


class _Adapted(nn.Module):
    """A layer with an adapter, as PEFT makes them of layers that it knows."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def adapted(model):
    endings = ("query", "v_proj", "c_attn", "intermediate.dense", "up_proj", "c_fc")
    for name, module in list(model.named_modules()):
        if name.endswith(endings):
            model.set_submodule(name, _Adapted(module).double())


def in_fp8(model):
    for name, module in list(model.named_modules()):
        if isinstance(module, TTLinear) and name.endswith(("dense", "c_proj", "o_proj", "down_proj")):
            model.set_submodule(name, nn.Linear(module.in_features, module.out_features))
    assert set_fp8_linears(model.float(), 16).in_fp8


REFUSALS = {  # what is done to a model: reason
    "hook": (hook_on_a_layer, "a hook watches one of its layers"),
    "offload": (offloaded, "a hook watches one of its layers"),
    "adapter": (adapted, "a _Adapted is in the place of a TTLinear"),
    "fp8": (in_fp8, "Fp8Linear is in the place of a TTLinear"),
}


def reasons(model):
    """Of blocks that are not parts of others."""
    return {
        block.refusal()
        for block in model.modules()
        if isinstance(block, Block) and not (isinstance(block, LatentAttention) and block.spec.output is None)
    }


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(("change", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_what_makes_the_own_forward_run(change, reason, name):
    model = model_of(name)
    inputs = inputs_of(name)
    change(model)
    assert blocks_that_run(model) == (0, 0)
    assert all(reason in found for found in reasons(model)), reasons(model)
    torch.testing.assert_close(results(model, inputs), results(unfused(model), inputs))


def flash(model):
    model.config._attn_implementation = "flash_attention_2"


def upcast(model):
    model.set_attn_implementation("eager")
    for block in model.transformer.h:
        block.attn.reorder_and_upcast_attn = True


def hooked(ending):
    def change(model):
        for name, module in model.named_modules():
            if name.endswith(ending):
                module.register_forward_hook(lambda *args: None)

    return change


def without_hidden_dropout(model):
    for module in model.modules():
        if isinstance(module, TiledMLP):
            module.dropout = nn.Identity()


PARTLY_REFUSED = {  # row, settings, what is done: blocks that run, and the reason of the others
    "high-rank": ("llama", {"rank": 8, "attention_bias": True}, None, (0, 2), "16 numbers and a head 8"),
    "rank-of-a-head": ("llama", {"rank": 8}, None, (2, 2), None),
    "rank-and-bias": ("gpt2", {"rank": 8}, None, (0, 2), "16 numbers and a head 8"),
    "rank-for-dense": ("gpt2", {"rank": 32, "n_head": 1}, None, (0, 2), "middle rank 32 is so high"),
    "flash": ("mistral", {}, flash, (0, 2), "its attention is 'flash_attention_2'"),
    "upcast": ("gpt2", {}, upcast, (0, 2), "reorder_and_upcast_attn computes eager attention"),
    "activation": ("bert", {"hidden_act": "tanh"}, None, (2, 0), "its activation Tanh is none of"),
    "of-attention": ("bert", {}, hooked("attention.self"), (0, 2), "a hook watches its attention"),
    "of-its-output": ("bert", {}, hooked("attention.output"), (0, 2), "a hook watches its attention or its output"),
    "of-intermediate": ("bert", {}, hooked("intermediate"), (2, 0), "a hook watches its intermediate"),
    "of-output": ("bert", {}, hooked(".output"), (0, 0), "a hook watches its intermediate or output"),
    "of-activation": ("llama", {}, hooked("act_fn"), (2, 0), "a hook watches its activation"),
    "of-dropout": (
        "t5",
        {},
        hooked("DenseReluDense.dropout"),
        (0, 0),
        "its hidden dropout is a FastDropout, or a hook",
    ),
    "dropout": ("t5-gated", {}, without_hidden_dropout, (0, 0), "its hidden dropout is a Identity"),
}


@pytest.mark.parametrize(
    ("name", "settings", "change", "running", "reason"), PARTLY_REFUSED.values(), ids=PARTLY_REFUSED
)
def test_what_makes_some_of_the_own_forwards_run(name, settings, change, running, reason):
    model, inputs = model_of(name, **settings), inputs_of(name)
    if change is upcast:
        model.float()  # the only dtype it takes
    if change is not None:
        change(model)
    assert blocks_that_run(model) == running
    assert any(str(reason) in str(found) for found in reasons(model))
    if change is not flash:  # which needs a GPU
        torch.testing.assert_close(results(model, inputs), results(unfused(model), inputs), rtol=1e-4, atol=1e-5)


def test_what_hooks_see_in_a_block_is_what_they_see_without():
    """Of modules that the block computes, and of those that it calls."""
    model, inputs = model_of("bert"), inputs_of("bert")
    names = ("attention.self", "attention.output", "attention", "intermediate", "LayerNorm", "layer.0", "output.dense")
    for ending in names:
        torch.testing.assert_close(*(seen_by_hook(each, ending, inputs) for each in (model, unfused(model))))


def seen_by_hook(model, ending, inputs):
    """What the first module of that name is given and gives."""
    seen = []
    module = next(module for name, module in model.named_modules() if name.endswith(ending))
    handle = module.register_forward_hook(lambda module, args, output: seen.extend((args, output)))
    model(**inputs)
    handle.remove()
    return seen


def test_a_model_that_is_compressed_in_part():
    inputs = inputs_of("bert")
    for excluded in ("key", "value", "attention.output.dense", "intermediate.dense"):
        config = model_of("bert").config
        model = get_comera_model(
            AutoModelForMaskedLM, ComeraConfig(rank=6, exclude_modules=[excluded]), config=type(config)(**BERT)
        ).double()
        running = (2, 0) if excluded == "intermediate.dense" else (0, 2)
        assert blocks_that_run(model) == running
        assert any("a Linear is in the place of a TTLinear" in str(reason) for reason in reasons(model))
        torch.testing.assert_close(results(model, inputs), results(unfused(model), inputs))


BERT = {**FUSED["bert"].sizes, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_cross_attention_keeps_its_own_forward():
    settings = {"is_decoder": True, "add_cross_attention": True}
    for name in ("bert-decoder", "gpt2"):
        model, inputs = (
            model_of(name, **(settings if "bert" in name else {"add_cross_attention": True})),
            inputs_of(name),
        )
        context = torch.randn(3, 4, 32, dtype=torch.float64)
        for cached in (True, False):
            options = {"encoder_hidden_states": context, "use_cache": cached}
            found, expected = (results(each, inputs, **options) for each in (model, unfused(model)))
            torch.testing.assert_close(found, expected)
        with torch.no_grad():
            whole = model(inputs["input_ids"], encoder_hidden_states=context).logits
            cache, steps = None, []
            for piece in inputs["input_ids"].split([4, 1, 4], dim=1):
                output = model(piece, encoder_hidden_states=context, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                steps.append(output.logits)
        torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_models_without_a_row_have_no_blocks():
    config = BartConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
    )  # fmt: skip
    model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=6), config=config)
    assert not any(isinstance(module, (LatentAttention, LatentAttentionWithOutput)) for module in model.modules())
    assert not any(
        isinstance(module, Block) for module in AutoModelForCausalLM.from_config(GPT2Config(**GPT2)).modules()
    )


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}
