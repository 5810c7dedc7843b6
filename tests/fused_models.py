"""Tiny models of architectures whose layers are fused, with inputs and results: one row an architecture."""

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import TTLinear
from hf_comera.modules.block import Block
from hf_comera.modules.fusion import unfuse
from hf_comera.modules.latent_attention import LatentAttention, LatentAttentionWithOutput

VOCABULARY, TOKENS = 99, 9
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 66, **SIZES, **TOKEN_IDS}
GROUPS = {**WORDS, "num_key_value_heads": 2, "head_dim": 8}
IMAGES = {"image_size": 16, "patch_size": 8, **SIZES}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 66, "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKEN_IDS}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0}
OPT = {**WORDS, "ffn_dim": 64, "word_embed_proj_dim": 32}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 1, "decoder_start_token_id": 0}  # fmt: skip  # noqa: E501
SPEECH = {**SIZES, "vocab_size": VOCABULARY, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "mask_time_prob": 0.0, "layerdrop": 0.0, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class Row:
    """How a model is made, and which of its layers are fused: attentions and feed-forward blocks."""

    auto_class: Any
    model_type: str
    sizes: dict[str, Any]
    attentions: int = 2
    forwards: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    """Of :class:`ComeraConfig`."""

    @property
    def reads(self) -> str:
        """``words``, ``pictures``, ``speech`` or ``pairs`` of texts."""
        if self.auto_class is AutoModelForSeq2SeqLM:
            return "pairs"
        return "pictures" if "image_size" in self.sizes else "speech" if "conv_dim" in self.sizes else "words"

    @property
    def is_causal(self) -> bool:
        """Whether it generates."""
        return self.auto_class is AutoModelForCausalLM


_LINEAR = {"target_modules": "all-linear"}
FUSED = {
    "bert": Row(AutoModelForMaskedLM, "bert", WORDS),
    "bert-decoder": Row(AutoModelForCausalLM, "bert", {**WORDS, "is_decoder": True}),
    "roberta": Row(AutoModelForMaskedLM, "roberta", WORDS),
    "xlm-roberta": Row(AutoModelForMaskedLM, "xlm-roberta", WORDS),
    "camembert": Row(AutoModelForMaskedLM, "camembert", WORDS),
    "electra": Row(AutoModelForMaskedLM, "electra", {**WORDS, "embedding_size": 32}),
    "ernie": Row(AutoModelForMaskedLM, "ernie", WORDS),
    "layoutlm": Row(AutoModelForMaskedLM, "layoutlm", WORDS),
    "distilbert": Row(AutoModelForMaskedLM, "distilbert", DISTILBERT),
    "vit": Row(AutoModelForImageClassification, "vit", IMAGES),
    "deit": Row(AutoModel, "deit", IMAGES),
    "dinov2": Row(AutoModelForImageClassification, "dinov2", {**IMAGES, "mlp_ratio": 2}),
    "siglip": Row(AutoModel, "siglip_vision_model", IMAGES, forwards=3),
    "clip-words": Row(AutoModel, "clip_text_model", WORDS),
    "clip-pictures": Row(AutoModel, "clip_vision_model", IMAGES),
    "gpt2": Row(AutoModelForCausalLM, "gpt2", GPT2),
    "gpt2-scaled": Row(AutoModelForCausalLM, "gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "opt": Row(AutoModelForCausalLM, "opt", OPT, forwards=0),
    "llama": Row(AutoModelForCausalLM, "llama", GROUPS),
    "llama-biases": Row(AutoModelForCausalLM, "llama", {**GROUPS, "attention_bias": True, "mlp_bias": True}),
    "mistral": Row(AutoModelForCausalLM, "mistral", {**GROUPS, "sliding_window": 4}),
    "qwen2": Row(
        AutoModelForCausalLM,
        "qwen2",
        {**GROUPS, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": Row(AutoModelForCausalLM, "qwen3", GROUPS),
    "gemma": Row(AutoModelForCausalLM, "gemma", {**GROUPS, "head_dim": 16}),
    "phi3": Row(AutoModelForCausalLM, "phi3", {**GROUPS, "partial_rotary_factor": 0.5}),
    "neox": Row(AutoModelForCausalLM, "gpt_neox", WORDS, attentions=0),
    "gptj": Row(AutoModelForCausalLM, "gptj", {**GPT2, "rotary_dim": 4, "n_inner": 64}, 0, settings=_LINEAR),
    "t5": Row(AutoModelForSeq2SeqLM, "t5", {**T5, "feed_forward_proj": "relu"}, attentions=0),
    "t5-gated": Row(AutoModelForSeq2SeqLM, "t5", {**T5, "feed_forward_proj": "gated-gelu"}, attentions=0),
    "wav2vec2": Row(AutoModelForCTC, "wav2vec2", SPEECH, attentions=0, settings=_LINEAR),
    "sam": Row(
        AutoModel,
        "sam_vision_model",
        {
            **IMAGES,
            "mlp_dim": 64,
            "output_channels": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "initializer_range": 0.02,
        },
        attentions=0,
        settings=_LINEAR,
    ),
}


@functools.cache
def _made(name: str, dropout: float, dtype: torch.dtype, rank: int, changes: tuple[tuple[str, Any], ...]) -> nn.Module:
    row = FUSED[name]
    config = CONFIG_MAPPING[row.model_type](**{**row.sizes, **dict(changes)})
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("drop" in key and key != "layerdrop"):
            setattr(config, key, dropout)
    torch.manual_seed(0)
    model = get_comera_model(row.auto_class, ComeraConfig(rank=rank, **row.settings), config=config).to(dtype)
    if row.is_causal and getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"  # else there is a warning, which compiled code cannot give
    for layer in model.modules():
        if isinstance(layer, TTLinear):
            layer.draw(layer.in_features**-0.5)  # so large that nothing hides behind residual connections
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def model_of(name, *, dropout=0.0, dtype=torch.float64, rank=6, **changes) -> Any:
    """A model whose layers are fused, in training, with large weights and with biases."""
    return copy.deepcopy(_made(name, dropout, dtype, rank, tuple(changes.items()))).train()


def unfused(model) -> Any:
    """A copy whose modules run their own forwards."""
    plain = copy.deepcopy(model)
    unfuse(plain)
    return plain


def inputs_of(name, *, padding="right", dtype=torch.float64) -> dict[str, torch.Tensor]:
    """A batch of three, the first with padding; with labels where the model takes some."""
    row = FUSED[name]
    if row.reads == "pictures":
        pictures = {"pixel_values": torch.randn(3, 3, 16, 16, dtype=dtype)}
        return (
            {**pictures, "labels": torch.tensor([0, 1, 1])}
            if "Classification" in row.auto_class.__name__
            else pictures
        )
    if row.reads == "speech":
        return {"input_values": torch.randn(3, 400, dtype=dtype), "labels": torch.randint(3, VOCABULARY, (3, 4))}
    ids, mask = torch.randint(3, VOCABULARY, (3, TOKENS)), torch.ones(3, TOKENS, dtype=torch.long)
    if padding != "none":
        padded = slice(0, 3) if padding == "left" else slice(-3, None)
        ids[0, padded], mask[0, padded] = 0, 0
    words = {"input_ids": ids, "attention_mask": mask}
    return words if row.auto_class is AutoModel else {**words, "labels": ids.masked_fill(mask == 0, -100)}


def results(model, inputs, seed=1, **options) -> dict[str, torch.Tensor]:
    """Loss, all other outputs and the gradients of all parameters, by name; tuples of outputs by place."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(**inputs, **options)
    found = dict(_flat({key: output[key] for key in output.keys() if "key_values" not in key}))
    loss = output.get("loss")
    if loss is None:
        y = output.last_hidden_state
        loss = (y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum()
    loss.backward()
    return {**found, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def _flat(tree, name=""):
    if isinstance(tree, torch.Tensor):
        yield name.rstrip("."), tree.detach()
    elif tree is not None:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _flat(value, f"{name}{key}.")


def blocks_that_run(model) -> tuple[int, int]:
    """Attentions and feed-forward blocks that are no fallbacks."""
    attentions = (LatentAttention, LatentAttentionWithOutput)
    running = [block for block in model.modules() if isinstance(block, Block) and block.refusal() is None]
    in_attention = sum(isinstance(block, attentions) for block in running)
    return in_attention, len(running) - in_attention


def layers_called(model, monkeypatch) -> list[str]:
    """Names of tensor-train layers as their own forwards are called from now on."""
    names, seen, forward = {module: name for name, module in model.named_modules()}, [], TTLinear.forward

    def watched(self, x):
        seen.append(names[self])
        return forward(self, x)

    monkeypatch.setattr(TTLinear, "forward", watched)
    return seen
