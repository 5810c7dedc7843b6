"""Multi-head latent attention with absorbed projections: keys and values stay latents of r numbers a token.

With ``query = latent_q @ right_q`` and ``key = latent_k @ right_k``, the scores of a head are ``latent_q M
latent_k.T`` with a small ``M = right_q right_k.T``. So all heads share one key, ``latent_k``, and one value,
``latent_v``, as in multi-query attention. Each head's context is a latent too and goes to the output layer by
``right_v left_o.T``.

Exact up to rounding, with any mask and dropout.

torch has no fused kernel with dropout on a CPU. There a few rows of scores at a time are made, used and dropped in the
processor's cache, and made once more in backward. The saved tensors are as wide as a latent, as in flash attention,
but for one bit a score that tells whether dropout keeps it.

Source: absorbed projections: DeepSeek-V2, arXiv:2405.04434, section 2.1. One key and value for all heads: Shazeer,
arXiv:1911.02150. Sums of softmax's gradient over a row as the product of output and gradient: Dao et al.,
arXiv:2205.14135.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_comera.ops.autograd import gradients_of
from hf_comera.ops.bit_dropout import kept_factors
from hf_comera.ops.precision import without_autocast

__all__ = ["absorbed_query", "bias_of_mask", "dropped_attention", "output_latent"]

# Shapes here: B = batch, T = tokens, S = tokens of key and value, H = heads, G = heads of key and value,
# D = head size, R = numbers of a latent, N = rows.


def absorbed_query(latent_q: Tensor, right_q: Tensor, right_k: Tensor, head_size: int) -> Tensor:
    """The query that meets latents of the key, head by head.

    Args:
        latent_q: Latent of the query.
        right_q: Right half of the query projection.
        right_k: Right half of the key projection.
        head_size: D.

    Shape:
        ``(B, T, R_q)``, ``(R_q, H * D)``, ``(R_k, G * D)`` -> ``(B, T, H, R_k)``; G divides H.
    """
    query_HRD, key_HRD = _by_head(right_q, head_size), _by_head(right_k, head_size)
    key_HRD = _repeated(key_HRD, query_HRD.shape[0])
    heads, rank_q, rank_k = query_HRD.shape[0], query_HRD.shape[1], key_HRD.shape[1]
    with without_autocast(latent_q):
        if _absorbing_pays(latent_q.shape[0] * latent_q.shape[1], rank_q, head_size, rank_k):
            absorbed_RHR = (query_HRD @ key_HRD.transpose(1, 2)).transpose(0, 1)
            return (latent_q @ absorbed_RHR.flatten(1)).unflatten(-1, (heads, rank_k))
        query_HND = (latent_q.flatten(0, 1) @ right_q).unflatten(-1, (heads, head_size)).transpose(0, 1)
        return (query_HND @ key_HRD.transpose(1, 2)).transpose(0, 1).unflatten(0, latent_q.shape[:2])


def output_latent(context: Tensor, right_v: Tensor, left_o: Tensor, head_size: int) -> Tensor:
    """The latent of the output projection, from the latent that each head makes of the values.

    Args:
        context: Weighted sums of latents of the value.
        right_v: Right half of the value projection.
        left_o: Left half of the output projection.
        head_size: D.

    Shape:
        ``(B, T, H, R_v)``, ``(R_v, G * D)``, ``(R_o, H * D)`` -> ``(B, T, R_o)``, in the dtype of ``left_o``.
    """
    batch, tokens, heads, rank = context.shape
    value_HRD = _repeated(_by_head(right_v, head_size), heads).to(left_o.dtype)
    context = context.to(left_o.dtype)
    with without_autocast(left_o):
        if _absorbing_pays(batch * tokens, rank, head_size, left_o.shape[0]):
            absorbed_HRR = value_HRD @ left_o.unflatten(1, (heads, head_size)).permute(1, 2, 0)
            return context.flatten(2) @ absorbed_HRR.flatten(0, 1)
        context_HND = context.flatten(0, 1).transpose(0, 1) @ value_HRD
        return (context_HND.transpose(0, 1).flatten(1) @ left_o.T).unflatten(0, (batch, tokens))


def _by_head(right: Tensor, head_size: int) -> Tensor:
    """``(R, H * D) -> (H, R, D)``."""
    return right.unflatten(1, (-1, head_size)).transpose(0, 1)


def _repeated(right_GRD: Tensor, heads: int) -> Tensor:
    """One for each head of the query, where several share a key and a value."""
    groups = heads // right_GRD.shape[0]
    return right_GRD if groups == 1 else right_GRD.repeat_interleave(groups, dim=0)


def _absorbing_pays(rows: int, rank: int, size: int, other_rank: int) -> bool:
    """Whether halves ``(rank, size)`` and ``(size, other_rank)`` are better multiplied before ``rows`` rows come.

    One token that follows a cached text is a single row: its product with both halves is cheaper. Exported programs,
    whose rows may be any number, are made for many.
    """
    if torch.compiler.is_exporting():
        return rank * other_rank <= size * (rank + other_rank)
    return rank * size * other_rank + rows * rank * other_rank <= rows * size * (rank + other_rank)


# Shapes here: B = batch, T = tokens, S = tokens of key and value, H = heads, R = rank of a latent, n = sequences, t =
# tokens and s = keys of a chunk.


# Scores at a time: few enough for the cache of a core; fewer cost more calls than they spare.
_CHUNK_SCORES = 1 << 18


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    attn_mask: Tensor | None = None,
    *,
    share: float,
    is_causal: bool = False,
    scale: float,
) -> Tensor:
    """``dropout(softmax(scale * query @ key.T + mask)) @ value``, head by head.

    Args:
        query: On the CPU.
        key: Of all heads.
        value: Of all heads.
        bits: What dropout keeps of the softmax, ``(B, T, H, ceil(S / 8))`` as drawn by ``ops/bit_dropout.py``.
        attn_mask: Bools, True where scores count, or numbers to add; of a shape that broadcasts to ``(B, H, T, S)``.
            A row without any score that counts gives zeros.
        share: The probability of being kept, which what is kept is divided by.
        is_causal: Whether a token attends to none behind it.
        scale: Of the scores.

    Shape:
        query ``(B, T, H, R)``, key and value ``(B, S, R)`` -> ``(B, T, H, R)``, in the dtype of the query; computed in
        float32 at least.
    """
    return _dropped_attention(query, key, value, bits, attn_mask, share, is_causal, scale)


def bias_of_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias of scores of attention for a mask that is True where they count."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


class _Options(NamedTuple):
    share: float
    """The probability of being kept."""
    scale: float
    """Of the scores."""
    is_causal: bool


@torch.library.custom_op("hf_comera::dropped_attention", mutates_args=())
def _dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    mask: Tensor | None,
    share: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    context = torch.empty_like(query, memory_format=torch.contiguous_format)
    with without_autocast(query):
        shares = _Shares.of(query, key, mask, bits, _Options(share, scale, is_causal))
        value_BSR = value.to(shares.dtype)
        for chunk in shares.chunks():
            kept = shares.rows(chunk).mul_(shares.factors(chunk))
            context[chunk] = (kept @ value_BSR[shares.keys(chunk)]).view(context[chunk].shape)
    if shares.dead is not None:
        context.masked_fill_(shares.dead, 0)
    return context


@_dropped_attention.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_comera::dropped_attention_backward", mutates_args=())
def _dropped_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bits: Tensor,
    mask: Tensor | None,
    context: Tensor,
    share: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    with without_autocast(query):
        shares = _Shares.of(query, key, mask, bits, _Options(share, scale, is_causal))
        grad = grad if shares.dead is None else grad.masked_fill(shares.dead, 0)
        return _gradients(shares, value, context, grad)


@_dropped_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, share, is_causal, scale = inputs
    ctx.options = _Options(share, scale, is_causal)
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, bits, mask, context = ctx.saved_tensors
    options: _Options = ctx.options
    with without_autocast(query):
        if torch.is_grad_enabled():  # second derivatives
            shares = _Shares.of(query, key, mask, bits, options)
            found: Any = _differentiable_gradients(shares, (query, key, value), grad)
        else:
            tensors = (grad, query, key, value, bits, mask, context)
            found = _dropped_attention_backward(*tensors, options.share, options.is_causal, options.scale)
    return *found, None, None, None, None, None


_dropped_attention.register_autograd(_backward, setup_context=_save)


Chunk = tuple[slice, slice]
"""Sequences and tokens."""


@dataclass(frozen=True)
class _Shares:
    """The softmax of scores, and what dropout makes of it, made a chunk at a time."""

    query: Tensor
    """``(B, T, H, R)``."""
    key: Tensor
    """``(B, S, R)``, in the dtype of the scores."""
    bits: Tensor
    """The kept entries, ``(B, T, H, ceil(S / 8))``."""
    mask: Tensor | None
    """As it was given, of a shape that broadcasts to ``(B, T, H, S)``."""
    dead: Tensor | None
    """Rows in which no score counts, broadcasting to ``(B, T, H, 1)``; None if there are none."""
    options: _Options

    @classmethod
    def of(cls, query: Tensor, key: Tensor, mask: Tensor | None, bits: Tensor, options: _Options) -> "_Shares":
        """Those of ``query``, from the mask as it was given."""
        dead = None
        if mask is not None:
            mask = _unexpanded(mask[(None,) * (4 - mask.ndim)].transpose(1, 2))
            counts = mask if mask.dtype == torch.bool else mask != -torch.inf
            dead = (counts & _triangle(query.shape[1], key.shape[1]) if options.is_causal else counts).any(-1, True)
            dead = None if dead.all() else ~dead
        return cls(query, key.to(torch.promote_types(query.dtype, torch.float32)), bits, mask, dead, options)

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores."""
        return self.key.dtype

    def chunks(self) -> Iterator[Chunk]:
        """Whole sequences, or some tokens of one, in order."""
        batch, tokens, heads, _ = self.query.shape
        num_tokens = max(1, _CHUNK_SCORES // max(1, heads * self.key.shape[1]))
        if num_tokens >= tokens:
            step = num_tokens // max(1, tokens)
            yield from ((slice(start, start + step), slice(0, tokens)) for start in range(0, batch, step))
            return
        for sequence in range(batch):
            for start in range(0, tokens, num_tokens):
                yield slice(sequence, sequence + 1), slice(start, min(tokens, start + num_tokens))

    def keys(self, chunk: Chunk) -> Chunk:
        """Sequences and keys that a chunk attends to: with ``is_causal`` none behind its last token."""
        num_keys = self.key.shape[1]
        return chunk[0], slice(0, min(num_keys, chunk[1].stop) if self.options.is_causal else num_keys)

    def flat(self, tensor_BTHR: Tensor, chunk: Chunk) -> Tensor:
        """A chunk of the query or of its like, ``(n, t * H, R)``, in the dtype of the scores."""
        return tensor_BTHR[chunk].flatten(1, 2).to(self.dtype)

    def rows(self, chunk: Chunk) -> Tensor:
        """The softmax of a chunk's scores, ``(n, t * H, s)``."""
        key = self.key[self.keys(chunk)] * self.options.scale
        scores = self.flat(self.query, chunk) @ key.transpose(1, 2)
        by_head = scores.unflatten(1, (-1, self.query.shape[2]))
        for bias in self.biases(chunk):
            by_head.add_(bias)
        return torch.softmax(scores, -1, out=scores)

    def factors(self, chunk: Chunk) -> Tensor:
        """The factors of dropout on the scores."""
        num_keys = self.keys(chunk)[1].stop
        bits = self.bits[chunk][..., : -(-num_keys // 8)].flatten(1, 2)
        return kept_factors(bits, num_keys, 1 / self.options.share, self.dtype)

    def whole(self) -> Chunk:
        """All in one chunk."""
        return slice(0, self.query.shape[0]), slice(0, self.query.shape[1])

    def biases(self, chunk: Chunk) -> Iterator[Tensor]:
        """The biases of the scores of a chunk; rows in which none counts get zeros, so that they stay finite."""
        keys = self.keys(chunk)[1]
        if self.mask is not None:
            bias = _part(self.mask, chunk)[..., keys]
            bias = bias_of_mask(bias, self.dtype) if bias.dtype == torch.bool else bias.to(self.dtype)
            yield bias if self.dead is None else bias.masked_fill(_part(self.dead, chunk), 0)
        if self.options.is_causal:
            counts = _triangle(self.query.shape[1], keys.stop, chunk[1])
            counts = counts if self.dead is None else counts | _part(self.dead, chunk)
            yield bias_of_mask(counts, self.dtype)


def _triangle(tokens: int, key_tokens: int, part: slice = slice(None)) -> Tensor:
    """Which keys are not behind some tokens, ``(1, t, 1, S)``."""
    places = torch.arange(tokens, device="cpu")[part]
    return (torch.arange(key_tokens, device="cpu") <= places[:, None])[None, :, None]


def _unexpanded(tensor: Tensor) -> Tensor:
    """With axes of size 1 where all entries of an axis are one in memory."""
    places = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor[tuple(slice(0, 1) if size > 1 and not stride else slice(None) for size, stride in places)]


def _part(tensor: Tensor, chunk: Chunk) -> Tensor:
    """The chunk of a tensor whose first two axes may have size 1 to broadcast."""
    sizes = zip(tensor.shape[:2], chunk, strict=True)
    return tensor[tuple(slice(None) if size == 1 else each for size, each in sizes)]


def _gradients(shares: _Shares, value: Tensor, context: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of query, key and value, in their dtypes."""
    query, key, value_BSR = shares.query, shares.key, value.to(shares.dtype)
    dquery, dkey, dvalue = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(key)
    for chunk in shares.chunks():
        keys = shares.keys(chunk)
        rows, drows = shares.rows(chunk), shares.flat(grad, chunk)
        mean = (drows * shares.flat(context, chunk)).sum(-1, keepdim=True)
        kept = shares.factors(chunk).mul_(rows)
        dvalue[keys].baddbmm_(kept.transpose(1, 2), drows)
        dscores = (drows @ value_BSR[keys].transpose(1, 2)).mul_(kept).addcmul_(rows, mean, value=-1)
        dquery[chunk] = (dscores @ key[keys]).mul_(shares.options.scale).view(dquery[chunk].shape)
        dkey[keys].baddbmm_(dscores.transpose(1, 2), shares.flat(query, chunk))
    return dquery, dkey.mul_(shares.options.scale).to(value.dtype), dvalue.to(value.dtype)


def _differentiable_gradients(shares: _Shares, tensors: Sequence[Tensor], grad: Tensor) -> list[Tensor | None]:
    """The same with a graph and all scores at once, for second derivatives."""
    chunk = shares.whole()
    factors = shares.factors(chunk).view(*shares.query.shape[:3], -1)

    def context_of(aliases: list[Any]) -> Tensor:
        query, key, value = (alias.to(shares.dtype) for alias in aliases)
        key, value = key[shares.keys(chunk)], value[shares.keys(chunk)]
        scores = torch.einsum("bthr,bsr->bths", query * shares.options.scale, key)
        for bias in shares.biases(chunk):
            scores = scores + bias
        context = torch.einsum("bths,bsr->bthr", scores.softmax(-1) * factors, value).to(aliases[0].dtype)
        return context if shares.dead is None else context.masked_fill(shares.dead, 0)

    return gradients_of(context_of, tensors, grad, create_graph=True)
