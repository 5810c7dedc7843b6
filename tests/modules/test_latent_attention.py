"""hf_comera/modules/latent_attention.py: attention over latents is attention, whatever the ranks, masks and draws."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, Qwen3Config
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.pytorch_utils import Conv1D

from hf_comera.modules import TTLinear, latent_attention
from hf_comera.modules.block import Block
from hf_comera.modules.fusion import fuse, unfuse
from hf_comera.ops import bit_dropout
from hf_comera.ops import latent_attention as latent_operators
from hf_comera.ops.selective import is_fused_attention

BATCH, TOKENS, HIDDEN, HEADS = 2, 5, 32, 4
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 32, "attn_implementation": "sdpa"}
ROTARY = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}
MODULES = {
    "bert": lambda rate: BertAttention(
        BertConfig(**SIZES, attention_probs_dropout_prob=rate, hidden_dropout_prob=0.0)
    ),
    "gpt2": lambda rate: GPT2Attention(GPT2Config(**SIZES, attn_pdrop=rate, resid_pdrop=0.0), layer_idx=0),
    "llama": lambda rate: LlamaAttention(LlamaConfig(**ROTARY, attention_dropout=rate), layer_idx=0),
    "qwen3": lambda rate: Qwen3Attention(Qwen3Config(**ROTARY, attention_dropout=rate), layer_idx=0),
}
each_module = pytest.mark.parametrize("name", MODULES)


def attention(name, ranks=6, bias=True, rate=0.0):
    """One whose linear layers are tensor trains of these ranks, in the order of its children."""
    module, made = MODULES[name](rate), []
    dense = [part for part, layer in module.named_modules() if isinstance(layer, (nn.Linear, Conv1D))]
    for place, part in enumerate(dense):
        layer = module.get_submodule(part)
        sizes = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
        rank = ranks if isinstance(ranks, int) else ranks[place % len(ranks)]
        made.append(TTLinear(*sizes, ranks=rank if rank else [0] * 5, bias=bias, dtype=torch.float64))
        if rank:
            made[-1].draw(sizes[0] ** -0.5)
        if bias:
            nn.init.normal_(made[-1].bias, std=0.5)
        module.set_submodule(part, made[-1])
    fuse(module)
    return module.double().train()


def inputs_of(name, tokens=TOKENS):
    """For the forward, with what rotates where the module asks for it."""
    options = {"hidden_states": torch.randn(BATCH, tokens, HIDDEN, dtype=torch.float64, requires_grad=True)}
    if name in ("llama", "qwen3"):
        angles = torch.rand(1, tokens, 8, dtype=torch.float64)
        options["position_embeddings"] = (angles.cos(), angles.sin())
    return {**options, "attention_mask": None}


def results(module, inputs, **options):
    """Output and all gradients, also that of a mask."""
    torch.manual_seed(1)
    y = module(**{**inputs, **options})[0]
    mask = options.get("attention_mask")
    tensors = [inputs["hidden_states"], *([mask] if mask is not None and mask.requires_grad else [])]
    tensors += [parameter for parameter in module.parameters() if parameter.requires_grad]
    grad = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    return [y, *torch.autograd.grad(y, tensors, grad, allow_unused=True, materialize_grads=True)]


def unfused(module):
    plain = copy.deepcopy(module)
    unfuse(plain)
    return plain


def assert_same_without_block(module, inputs, **options):
    assert isinstance(module, Block)
    assert module.refusal() is None
    torch.testing.assert_close(results(module, inputs, **options), results(unfused(module), inputs, **options))


RANKS = [
    {"ranks": 6},
    {"ranks": 7},
    {"ranks": 8, "bias": False},
    {"ranks": 5, "bias": False},
    {"ranks": (2, 5, 7, 6)},
    {"ranks": (12, 5, 3, 12)},
    {"ranks": (0, 5, 5, 5)},
    {"ranks": (5, 0, 5, 5)},
    {"ranks": (5, 5, 0, 5), "bias": False},
    {"ranks": (5, 5, 5, 0)},
    {"ranks": 0},
]


@pytest.mark.parametrize("settings", RANKS, ids=str)
@each_module
def test_ranks_and_biases(name, settings):
    if name == "gpt2" and isinstance(settings["ranks"], tuple):
        settings = {**settings, "ranks": settings["ranks"][1::2]}
    assert_same_without_block(attention(name, **settings), inputs_of(name))


def masks():
    seen = torch.arange(TOKENS) < TOKENS - 2
    lower = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return {
        "none": None,
        "padding": seen.expand(BATCH, 1, TOKENS, TOKENS),
        "causal": lower.expand(BATCH, 1, TOKENS, TOKENS),
        "one for all texts": lower[None, None],
        "floats": torch.randn(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64),
        "infinite": torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64).masked_fill(~lower, -torch.inf),
        "of each head": torch.randn(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float64),
        "of float32": torch.randn(BATCH, 1, TOKENS, TOKENS),
    }


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("which", masks())
@each_module
def test_masks(name, which, rate, monkeypatch):
    monkeypatch.setattr(bit_dropout, "serves", lambda *args: False)  # drop what the module drops
    module, inputs, mask = attention(name, rate=rate), inputs_of(name), masks()[which]
    found = results(module, inputs, attention_mask=mask)
    mask = mask.double() if which == "of float32" else mask  # the only dtype that torch takes
    torch.testing.assert_close(found, results(unfused(module), inputs, attention_mask=mask))


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("fast", [False, True])
@each_module
def test_a_mask_that_is_learned_gets_its_gradient(name, rate, fast, monkeypatch):
    if fast:
        monkeypatch.setattr(bit_dropout, "MIN_NUMEL", 1)
    else:
        monkeypatch.setattr(bit_dropout, "serves", lambda *args: False)
    mask = torch.randn(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64, requires_grad=True)
    module, inputs = attention(name, rate=rate), inputs_of(name)
    found = results(module, inputs, attention_mask=mask)
    if not fast or not rate:
        torch.testing.assert_close(found, results(unfused(module), inputs, attention_mask=mask))
    assert found[2].any()


@pytest.mark.parametrize("which", ["none", "padding", "floats"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_mean_over_fast_draws_is_attention_without_dropout(name, which, monkeypatch):
    monkeypatch.setattr(bit_dropout, "MIN_NUMEL", 1)
    monkeypatch.setattr(latent_operators, "_CHUNK_SCORES", 1000)
    module, mask = attention(name, rate=0.25), masks()[which]
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64).expand(4000, -1, -1)
    mask = None if mask is None else mask[:1].expand(4000, -1, -1, -1)
    run = (
        module
        if name == "gpt2"
        else lambda *args, **options: module.self(*args, output=module.output.dense, **options)
    )
    with torch.no_grad():
        found = run(x, attention_mask=mask)[0]
        module.eval()
        expected = run(x, attention_mask=mask)[0]
    assert found.std(0).mean() > 0.05
    torch.testing.assert_close(found.mean(0), expected[0], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@each_module
def test_single_tokens_and_single_texts(name, implementation):
    module = attention(name)
    for part in module.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = implementation
    for tokens in (1, 3):
        inputs = inputs_of(name, tokens)
        found, expected = results(module, inputs), results(unfused(module), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "frozen", [["key", "k_proj"], ["value", "v_proj"], ["query", "q_proj", "c_attn"], ["dense", "o_proj"]]
)
@each_module
def test_frozen_layers(name, frozen):
    module = attention(name)
    for part, layer in module.named_modules():
        if part.endswith(tuple(frozen)):
            layer.requires_grad_(False)
    assert_same_without_block(module, inputs_of(name))


@each_module
def test_an_input_without_gradient_and_none_at_all(name):
    module, inputs = attention(name).eval(), inputs_of(name)
    inputs["hidden_states"] = inputs["hidden_states"].detach()
    expected = unfused(module)(**inputs)[0]
    torch.testing.assert_close(module(**inputs)[0], expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = module(**inputs)[0]
        assert not y.requires_grad
        torch.testing.assert_close(y.clone(), expected.detach())


@each_module
def test_positional_arguments(name):
    module, inputs = attention(name).eval(), inputs_of(name)
    x, mask = inputs.pop("hidden_states"), masks()["padding"]
    if name in ("llama", "qwen3"):
        given = (inputs["position_embeddings"], mask)
    else:
        given = (None, mask) if name == "gpt2" else (mask,)
    torch.testing.assert_close(module(x, *given)[0], unfused(module)(x, *given)[0])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_each_backward_rebuilds_keys_and_not_what_attention_made_of_them(name, monkeypatch):
    computed, dispatch = [], latent_attention._KeptAttention.__torch_dispatch__

    def watched(self, func, *args):
        if is_fused_attention(func):
            computed.append(not self.kept)
        return dispatch(self, func, *args)

    monkeypatch.setattr(latent_attention._KeptAttention, "__torch_dispatch__", watched)
    module, inputs = attention(name), inputs_of(name)
    y = module(**inputs)[0]
    first = torch.autograd.grad(y.sum(), list(module.parameters()), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), list(module.parameters())), first)
    assert computed == [True, False, False]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_is_kept_goes_with_the_graph(name, monkeypatch):
    kept, original = [], latent_attention._keeping_attention

    def watched():
        modes = original()
        kept.append(weakref.ref(modes[0]))
        return modes

    monkeypatch.setattr(latent_attention, "_keeping_attention", watched)
    module, inputs = attention(name), inputs_of(name)
    gc.disable()
    try:
        module(**inputs)[0].sum().backward()
        assert [reference() for reference in kept] == [None], "no cycle holds it until the garbage collector comes"
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_under_autocast_halves_are_in_16_bits(name, monkeypatch):
    dtypes, original = set(), TTLinear.halves
    monkeypatch.setattr(TTLinear, "halves", lambda self, dtype: dtypes.add(dtype) or original(self, dtype))
    module, inputs = attention(name).float(), inputs_of(name)
    inputs = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    if "position_embeddings" in inputs:
        inputs["position_embeddings"] = tuple(part.float() for part in inputs["position_embeddings"])
    with torch.autocast("cpu", torch.bfloat16):
        module(**inputs)
    assert dtypes == {torch.bfloat16}
