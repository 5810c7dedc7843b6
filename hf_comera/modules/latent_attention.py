"""Self-attention as multi-head latent attention: query, key and value stay latents of the tensor-train projections.

Keys and values are plain tensors of r numbers a token, for any cache class and any attention function of Transformers.
Models with rotary positions keep values and output as latents; their keys are rebuilt from latents and rotated.

Source: absorbed projections: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_comera.modules.block import Block, is_watched, layer_refusal, text_digest
from hf_comera.modules.tt_linear import TTLinear
from hf_comera.ops import bit_dropout
from hf_comera.ops.autograd import is_transformed
from hf_comera.ops.fused_loss import is_recorded
from hf_comera.ops.halves import RANK_MULTIPLE, padded_rank
from hf_comera.ops.latent_attention import absorbed_query, dropped_attention, output_latent
from hf_comera.ops.precision import autocast_dtype, without_autocast
from hf_comera.ops.selective import is_fused_attention

__all__ = [
    "ATTENTIONS",
    "WRAPPERS",
    "AttentionSpec",
    "LatentAttention",
    "LatentAttentionWithOutput",
    "attention_block",
]

IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")
"""Attention functions that take any head size; those of FlashAttention have tables of sizes."""


@dataclass(frozen=True)
class AttentionSpec:
    """How one forward of Transformers names what it uses.

    Attributes:
        projections: Children for query, key and value, or the one child that gives all three side by side.
        output: Child that takes the context; None where a sibling module has it (see :data:`WRAPPERS`).
        head_size: Attribute.
        scaling: Attribute.
        dropout: Attribute: a rate, or an ``nn.Dropout``.
        options: What the forward hands to the attention function besides: option to attribute (dots lead inside).
        passes_options: Whether it hands on the options that it gets itself.
        rotary: Whether query and key are rotated by ``position_embeddings``.
        norms: Children that normalize the heads of query and key.
        output_dropout: Child that follows the output.
        unless: Attribute that, where true, stands against the block under eager attention.
    """

    projections: tuple[str, ...]
    output: str | None
    head_size: str = "head_dim"
    scaling: str = "scaling"
    dropout: str = "attention_dropout"
    options: tuple[tuple[str, str], ...] = ()
    passes_options: bool = True
    rotary: bool = False
    norms: tuple[str, ...] = ()
    output_dropout: str | None = None
    unless: str | None = None


_QKV = ("q_proj", "k_proj", "v_proj")
_BERT = ("query", "key", "value")

ATTENTIONS = {
    # BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE
    "53a17241fdc7c590": AttentionSpec(_BERT, None, "attention_head_size", dropout="dropout"),
    # LayoutLM and the text towers of CLIP's successors
    "083d228ff6ae9cac": AttentionSpec(_BERT, None, "attention_head_size"),
    "0a0a2f1185d25136": AttentionSpec(  # DistilBERT
        ("q_lin", "k_lin", "v_lin"), "out_lin", "attention_head_size", dropout="dropout"
    ),
    "db63e95ee026cf0f": AttentionSpec(_QKV, "o_proj"),  # ViT, DeiT, DINOv2
    "4c12c5163364a24c": AttentionSpec(  # SigLIP
        _QKV,
        "out_proj",
        scaling="scale",
        dropout="dropout",
        options=(("is_causal", "is_causal"),),
        passes_options=False,
    ),
    "59ef0030976f1d44": AttentionSpec(_QKV, "out_proj", scaling="scale", dropout="dropout"),  # CLIP
    "4b39dd6eb8d2173f": AttentionSpec(  # GPT-2
        ("c_attn",),
        "c_proj",
        dropout="attn_dropout",
        output_dropout="resid_dropout",
        unless="reorder_and_upcast_attn",
    ),
    "ce8289aec411ecbd": AttentionSpec(_QKV, "out_proj", dropout="dropout"),  # OPT
    "477c5787e442b66d": AttentionSpec(_QKV, "o_proj", rotary=True),  # Llama, Gemma
    "dc6485df560b11fb": AttentionSpec(  # Mistral
        _QKV, "o_proj", rotary=True, options=(("sliding_window", "config.sliding_window"),)
    ),
    "74a47e6a75e63cb3": AttentionSpec(  # Qwen2
        _QKV, "o_proj", rotary=True, options=(("sliding_window", "sliding_window"),)
    ),
    "81de78436c6fdc8c": AttentionSpec(  # Qwen3
        _QKV,
        "o_proj",
        rotary=True,
        options=(("sliding_window", "sliding_window"),),
        norms=("q_norm", "k_norm"),
    ),
    "5827edeb35dd32c9": AttentionSpec(  # Phi-3
        ("qkv_proj",), "o_proj", rotary=True, options=(("sliding_window", "config.sliding_window"),)
    ),
}
"""By the digest of the forward's text; an architecture is served if its forward has one of these texts."""

WRAPPERS = {
    "a7b0a5f20420124f": True,  # BERT and those like it
    "6c82c1a30bbe6751": False,  # LayoutLM and those like it
}
"""Modules whose child ``self`` attends and whose child ``output`` projects, by the digest of their forward's text:
whether they return the weights too."""

_OUTPUT_OF_WRAPPERS = "4086a03d6f9ac22a"
"""Digest of the forward of the child ``output``: projection, dropout, norm of the sum with the input."""

_OTHER_USES = ("encoder_hidden_states", "key_value_states", "cache")
"""Options with which an attention is no self-attention, or has a cache that attention functions fill."""


class _Projection(NamedTuple):
    """``latent @ right`` is what the layer gives, its bias included."""

    latent: Tensor
    """``(B, T, R)``."""
    right: Tensor
    """``(R, O)``."""


class LatentAttention(Block):
    """Self-attention whose keys and values are latents."""

    title = "latent attention"
    spec: ClassVar[AttentionSpec]

    @classmethod
    def row(cls, own_class: type[nn.Module]) -> AttentionSpec | None:
        """The row of this forward."""
        return ATTENTIONS.get(text_digest(own_class.forward) or "")

    @property
    def is_complete(self) -> bool:
        """Whether it has its output projection."""
        return self.spec.output is not None

    def fused_layers(self) -> list[TTLinear]:
        """Projections, and the output projection where it is a child."""
        names = [*self.spec.projections, *([self.spec.output] if self.spec.output else [])]
        return [_attribute(self, name) for name in names]

    def cached_numbers(self) -> tuple[int, int]:
        """Numbers that a token takes in a cache, and that it would take without latents."""
        layers = [_attribute(self, name) for name in self.spec.projections]
        size = int(getattr(self, self.spec.head_size))
        if len(layers) == 3:
            widths = [layer.out_features for layer in layers[1:]]
        else:
            queries = layers[0].out_features // 3
            if self.spec.rotary:
                queries = int(self.config.num_attention_heads) * size
            widths = [(layers[0].out_features - queries) // 2] * 2
        ranks = [padded_rank(layer.middle_rank + (layer.bias is not None)) for layer in (layers * 3)[1:3]]
        if self.spec.rotary:  # keys are cached as they are
            groups = widths[0] // size
            ranks = [widths[0], -(-ranks[1] // groups) * groups]
        return sum(ranks), sum(widths)

    def refusal(self, output: nn.Module | None = None) -> str | None:
        """Why the module's own forward runs, or None if the block does."""
        spec = self.spec
        output = _attribute(self, spec.output) if spec.output else output
        layers = [*(_attribute(self, name) for name in spec.projections), output]
        if reason := layer_refusal(layers):
            return reason
        implementation = self.config._attn_implementation
        if implementation not in IMPLEMENTATIONS:
            return f"its attention is {implementation!r}, and latents need one of {', '.join(IMPLEMENTATIONS)}"
        if implementation == "eager" and spec.unless is not None and getattr(self, spec.unless):
            return f"{spec.unless} computes eager attention in its own way"
        size = int(getattr(self, spec.head_size))
        met = layers[-2:-1] if spec.rotary else layers[:-1][-2:]
        # a layer without ranks is a latent of one number: its bias
        needed = max(padded_rank(max(1, layer.middle_rank + (layer.bias is not None))) for layer in met)
        # a single head with a latent of its size: nothing is won, and a cache would not tell which of them it holds
        if needed > size or needed == _size_of_value(self):
            return f"a latent with its bias has {needed} numbers and a head {size}: the rank would have to be lower"
        return None

    def forward(self, hidden_states: Tensor, *args: Any, output: nn.Module | None = None, **options: Any) -> Any:
        """As the module's own forward; with ``output``, the output projection of a wrapper, its result instead."""
        options.update(zip(self.arguments, args, strict=False))
        if self.is_for_own_forward(options, output):
            return super().forward(hidden_states, **options)
        spec = self.spec
        output_layer: Any = _attribute(self, spec.output) if spec.output else output
        dtype = autocast_dtype(hidden_states)
        with without_autocast(hidden_states):
            projections = _project(self, spec, hidden_states.to(dtype))
            attend = _rotary_attention if spec.rotary else _plain_attention
            context, weights = attend(self, spec, projections, options)
            left, right = output_layer.halves(dtype)
            latent = output_latent(context, projections[2].right, left, int(getattr(self, spec.head_size)))
            y = output_layer.from_latent(latent, right)
        if spec.output_dropout is not None:
            y = _attribute(self, spec.output_dropout)(y)
        return y, weights

    def is_for_own_forward(self, options: dict[str, Any], output: nn.Module | None = None) -> bool:
        """Whether the own forward takes this call; latents that it would find in its cache are written out for it."""
        if any(options.get(name) is not None for name in _OTHER_USES):
            return True
        refuses, begun = self.refusal(output) is not None, _begun(self, options)
        if begun is None:
            return refuses
        if begun.values.shape[1] * begun.values.shape[3] != _size_of_value(self):
            is_constant = torch.is_grad_enabled() and not begun.values.requires_grad
            if not refuses and not (is_constant and any(each.requires_grad for each in self.parameters())):
                return False
            # right halves that train would get a gradient for keys and values of before
            _write_out(self, self.spec, begun)
        return True


class LatentAttentionWithOutput(Block):
    """A module whose child ``self`` attends and whose child ``output`` has the output projection, as BERT's."""

    title = LatentAttention.title
    spec: ClassVar[bool]
    """Whether it returns the weights too."""

    @classmethod
    def row(cls, own_class: type[nn.Module]) -> bool | None:
        """The row of this forward."""
        return WRAPPERS.get(text_digest(own_class.forward) or "")

    def fused_layers(self) -> list[TTLinear]:
        """Projections and output projection."""
        return [*self.self.fused_layers(), self.output.dense]

    def refusal(self) -> str | None:
        """Why the module's own forward runs, or None if the block does."""
        attention, output = self.self, self.output
        if is_watched(attention) or is_watched(output):
            return "a hook watches its attention or its output module"
        return attention.refusal(output.dense)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """As the module's own forward."""
        options.update(zip(self.arguments, args, strict=False))
        attention, output = self.self, self.output
        if self.refusal() is not None or attention.is_for_own_forward(options, output.dense):
            return super().forward(hidden_states, **options)
        y, weights = attention(hidden_states, output=output.dense, **options)
        y = output.LayerNorm(output.dropout(y) + hidden_states)
        return (y, weights) if self.spec else y


def attention_block(module: nn.Module) -> type[Block] | None:
    """The block for ``module``, or None if its forward is not in the table."""
    own_class: Any = type(module)
    if LatentAttention.row(own_class) is not None and hasattr(module, "config"):
        return LatentAttention
    if LatentAttentionWithOutput.row(own_class) is None or attention_block(module.get_submodule("self")) is None:
        return None
    is_known = text_digest(type(module.get_submodule("output")).forward) == _OUTPUT_OF_WRAPPERS
    return LatentAttentionWithOutput if is_known else None


def _project(module: LatentAttention, spec: AttentionSpec, x: Tensor) -> list[_Projection]:
    """Query, key and value, from one product of ``x`` with the left halves side by side."""
    lefts, rights, ones = _halves(module, spec, x.dtype)
    latents = linear(x, torch.cat(lefts), ones).split([len(left) for left in lefts], dim=-1)
    return [_Projection(latents[index % len(latents)], right) for index, right in enumerate(rights)]


def _halves(
    module: LatentAttention, spec: AttentionSpec, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Left halves of the projections, right ones of query, key and value, and what to add to all latents."""
    layers: list[TTLinear] = [_attribute(module, name) for name in spec.projections]
    lefts, rights = zip(*(_halves_with_bias(layer, dtype) for layer in layers), strict=True)
    ones, start = lefts[0].new_zeros(sum(map(len, lefts))), 0
    for layer, left in zip(layers, lefts, strict=True):
        if layer.bias is not None:
            ones[start + layer.middle_rank].fill_(1)
        start += len(left)
    if len(layers) == 1:
        keys = _size_of_value(module)
        rights = rights[0].split([layers[0].out_features - 2 * keys, keys, keys], dim=1)
    return lefts, rights, ones


def _size_of_value(module: LatentAttention) -> int:
    """Numbers of a token's value in all heads."""
    heads = getattr(module.config, "num_key_value_heads", None) or module.config.num_attention_heads
    return int(heads) * int(getattr(module, module.spec.head_size))


def _halves_with_bias(layer: TTLinear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Halves of the layer, its bias a row of the right one, to which a one in the latent belongs.

    Shape:
        ``(R, I)``, ``(R, O)``.
    """
    left, right = layer.halves(dtype)
    if layer.bias is None:
        return left, right
    if layer.middle_rank == len(left):  # elsewhere no rank is added for a bias, here the latent has to carry it
        left, right = (pad(half, (0, 0, 0, RANK_MULTIPLE)) for half in (left, right))
    place = torch.full((1,), layer.middle_rank, device=left.device)  # filled there: a graph reads nothing of the host
    # copied, not added: entries beside the bias must stay clear of an infinite one
    return left, right.index_copy(0, place, layer.bias.to(dtype)[None])


def _plain_attention(
    module: LatentAttention, spec: AttentionSpec, projections: Sequence[_Projection], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Context ``(B, T, H, R_v)`` and, where asked for, weights; keys and values go to the cache as latents."""
    query, key, value = projections
    query_BTHR = absorbed_query(query.latent, query.right, key.right, int(getattr(module, spec.head_size)))
    key_B1SR, value_B1SR = key.latent.unsqueeze(1), value.latent.unsqueeze(1)
    if (cache := _cache(options)) is not None:
        key_B1SR, value_B1SR = cache.update(key_B1SR, value_B1SR, module.layer_idx)
    rank, heads = value_B1SR.shape[-1], query_BTHR.shape[2]
    width = max(key_B1SR.shape[-1], rank)  # fused attention wants one size
    parts = [_widened(part, width) for part in (query_BTHR, key_B1SR, value_B1SR)]
    context, weights = _attend(module, parts[0], parts[1].expand(-1, heads, -1, -1), parts[2], options)
    return context[..., :rank], weights


def _rotary_attention(
    module: LatentAttention, spec: AttentionSpec, projections: Sequence[_Projection], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The same where query and key are rotated: they are rebuilt from latents, once more in backward."""
    rotations, value_BSR = options.pop("position_embeddings"), projections[2].latent
    # compilers choose what to recompute themselves, transforms know no checkpoints, and steps that are recorded cannot
    # set generators back
    drops = _rate(module, spec) > 0
    rebuilds = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transformed()
    rebuilds = rebuilds and not (drops and is_recorded(value_BSR))
    cache = _cache(options)
    options.pop("past_key_values", None)  # or the graph would hold on to the cache, by the options of the checkpoint
    if cache is not None:
        query, key = _rotated(module, spec, projections, rotations)
        tokens, groups, rank = key.shape[2], key.shape[1], value_BSR.shape[-1]
        # a cache wants as many heads of values as of keys: the latent is cut into as many pieces
        pieces = _widened(value_BSR, -(-rank // groups) * groups).unflatten(-1, (groups, -1)).transpose(1, 2)
        key, pieces = cache.update(key, pieces, module.layer_idx)
        if not rebuilds or key.shape[2] > tokens:
            value_BSR = pieces.transpose(1, 2).flatten(2)[..., :rank]
            return _attend_rotated(module, query, key, value_BSR, options)

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        pairs = [_Projection(*tensors[:2]), _Projection(*tensors[2:4])]
        query, key = _rotated(module, spec, pairs, rotations)
        return _attend_rotated(module, query, key, tensors[4], options)

    tensors = (*projections[0], *projections[1], value_BSR)
    if not rebuilds:
        return attend(*tensors)
    return checkpoint(attend, *tensors, use_reentrant=False, context_fn=_keeping_attention, preserve_rng_state=drops)


def _rotated(
    module: LatentAttention, spec: AttentionSpec, projections: Sequence[_Projection], rotations: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Query ``(B, H, T, D)`` and key ``(B, G, T, D)``."""
    size = int(getattr(module, spec.head_size))
    query, key = ((part.latent @ part.right).unflatten(-1, (-1, size)) for part in projections[:2])
    if spec.norms:
        query, key = _attribute(module, spec.norms[0])(query), _attribute(module, spec.norms[1])(key)
    rotate = sys.modules[module.home].apply_rotary_pos_emb
    rotated = rotate(query.transpose(1, 2), key.transpose(1, 2), *rotations)
    # under autocast rotations are in float32, and so is what they give
    query, key = (part.to(projections[0].latent.dtype) for part in rotated)
    return query, key


def _attend_rotated(
    module: LatentAttention, query: Tensor, key: Tensor, value_BSR: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    rank, heads = value_BSR.shape[-1], query.shape[1]
    value = _widened(value_BSR, key.shape[-1]).unsqueeze(1)
    key = key.repeat_interleave(heads // key.shape[1], dim=1) if heads > key.shape[1] else key
    context, weights = _attend(module, query.transpose(1, 2), key, value, options)
    return context[..., :rank], weights


def _keeping_attention() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For a checkpoint: query and key are rebuilt in backward, what attention has made of them is kept."""
    kept = _KeptAttention()
    return kept, kept


class _KeptAttention(TorchDispatchMode):
    """Computes core attention once, and gives it again to each backward that asks.

    torch's own selective checkpoints allow one backward only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[Any, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_fused_attention(func):
            return func(*args, **(kwargs or {}))
        if not self.kept:
            self.kept = func(*args, **(kwargs or {}))
        # detached: autograd is about to write to what it gets, and would have it keep itself alive
        return tuple(part.detach() if isinstance(part, Tensor) else part for part in self.kept)


def _attend(
    module: LatentAttention, query_BTHD: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Core attention by the function that the model is set to.

    Shape:
        query ``(B, T, H, D)``, key ``(B, H, S, D)``, value ``(B, 1, S, D)`` of all heads -> ``(B, T, H, D)``.
    """
    spec, mask, tokens, heads = module.spec, options.get("attention_mask"), *query_BTHD.shape[1:3]
    implementation = module.config._attn_implementation
    rate = _rate(module, spec)
    scaling = getattr(module, spec.scaling)
    given = {name: option for name, option in options.items() if spec.passes_options and name not in _NOT_PASSED}
    given |= {option: _attribute(module, name, None) for option, name in spec.options}
    if implementation == "sdpa" and not spec.rotary and _drops_fast(query_BTHD, key, mask, rate):
        is_causal = tokens > 1 and mask is None and given.get("is_causal", module.is_causal)
        bits = bit_dropout.draw_kept((*query_BTHD.shape[:3], key.shape[2]), rate)
        share = bit_dropout.kept_share(rate)
        parts = query_BTHD, key[:, 0], value[:, 0], bits, mask
        return dropped_attention(*parts, share=share, is_causal=is_causal, scale=scaling), None
    dtype, exact = query_BTHD.dtype, torch.float32
    on_cpu_in_16_bits = query_BTHD.device.type == "cpu" and dtype.itemsize == 2
    if on_cpu_in_16_bits:  # whose kernel, where tried, was up to five times slower in 16 bits
        query_BTHD, key, value = query_BTHD.to(exact), key.to(exact), value.to(exact)
    if isinstance(mask, Tensor) and mask.is_floating_point():  # that of flex_attention is no tensor
        mask = mask.to(query_BTHD.dtype)
    query = query_BTHD.transpose(1, 2)
    # heads of a single token are rows of one head: they share key and value, which then are read once
    as_rows = implementation == "sdpa" and tokens == 1 and not spec.rotary and (mask is None or mask.shape[1] == 1)
    if as_rows:
        query, key, given = query_BTHD, key[:, :1], {**given, "is_causal": False}
    else:
        value = value.expand(-1, heads, -1, -1)
    own = sys.modules[module.home].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, own)
    context, weights = attend(_Caller(module), query, key, value, mask, dropout=rate, scaling=scaling, **given)
    return (context.transpose(1, 2) if as_rows else context).to(dtype), weights


_NOT_PASSED = ("past_key_values", "attention_mask", "output_attentions", "encoder_attention_mask", *_OTHER_USES)
"""Arguments that forwards name, and so do not hand on."""


def _rate(module: LatentAttention, spec: AttentionSpec) -> float:
    """Of dropout, now."""
    rate = _attribute(module, spec.dropout)
    return float(rate.p if isinstance(rate, nn.Dropout) else rate) if module.training else 0.0


def _drops_fast(query_BTHD: Tensor, key: Tensor, mask: Tensor | None, rate: float) -> bool:
    """Whether dropout is our own: torch has no fused attention with dropout on a CPU."""
    batch, tokens, heads, _ = query_BTHD.shape
    served = rate > 0 and bit_dropout.serves(query_BTHD.device, batch * tokens * heads * key.shape[2], rate)
    return served and (mask is None or not mask.requires_grad)


class _Caller:
    """The module as an attention function sees it: every head has its key and value already."""

    num_key_value_groups = 1

    def __init__(self, module: LatentAttention) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _cache(options: dict[str, Any]) -> Any:
    """The cache of self-attention, if there is one."""
    cache = options.get("past_key_values")
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _begun(module: LatentAttention, options: dict[str, Any]) -> Any:
    """The layer of the cache for this module, if it already holds tokens."""
    cache, index = _cache(options), getattr(module, "layer_idx", None)
    if cache is None or index is None or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    return layer if layer.is_initialized and layer.values.numel() else None


def _write_out(module: LatentAttention, spec: AttentionSpec, begun: Any) -> None:
    """Make of the latents in a cache the keys and values that the module's own forward puts there.

    Raises:
        ValueError: If the projections are no tensor trains any more.
    """
    for name in spec.projections:
        if not isinstance(layer := _attribute(module, name), TTLinear):
            raise ValueError(
                f"past_key_values holds latents of {name}, which has become a {type(layer).__name__}; it needs keys "
                "and values. Start with an empty cache, for example past_key_values=DynamicCache()."
            )
    size, latents = int(getattr(module, spec.head_size)), begun.values.transpose(1, 2).flatten(2)
    with torch.set_grad_enabled(begun.values.requires_grad), without_autocast(latents):
        _, (_, right_k, right_v), _ = _halves(module, spec, latents.dtype)
        begun.values = (latents[..., : len(right_v)] @ right_v).unflatten(2, (-1, size)).transpose(1, 2)
        if not spec.rotary:
            begun.keys = (begun.keys[:, 0] @ right_k).unflatten(2, (-1, size)).transpose(1, 2)


def _widened(tensor: Tensor, size: int) -> Tensor:
    """With zeros up to ``size`` on the last axis."""
    return tensor if tensor.shape[-1] == size else pad(tensor, (0, size - tensor.shape[-1]))


_MISSING = object()


def _attribute(module: Any, name: str, default: Any = _MISSING) -> Any:
    """``module.a.b`` for ``"a.b"``."""
    for part in name.split("."):
        module = getattr(module, part) if default is _MISSING else getattr(module, part, default)
    return module
