"""Core attention over codes: query, key and value stay in the rank space, and so does what attention makes of them.

With ``query = code_q @ right_q`` and ``key = code_k @ right_k``, the scores of a head are ``code_q M code_k.T``, where
``M = right_q right_k.T`` of that head is small. So all heads share one key, ``code_k``, and one value, ``code_v``, as
in multi-query attention; what a head makes of the value is a code too, and goes to the output layer by another small
matrix, ``right_v left_o.T``. Neither query, key, value nor what attention makes of them is ever as wide as the model.

Exact up to rounding, with any mask and dropout. It needs projections whose outputs go to attention as they are: rotary
positions would come between the halves.

Source: ours; sharing keys and values between heads is that of Shazeer, arXiv:1911.02150.
"""

# Shapes here: B = batch, T = tokens, S = tokens of key and value, H = heads, D = head size, R = rank of a code.

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hf_comera.ops import kept_bits
from hf_comera.ops.dropped_attention import dropped_attention
from hf_comera.ops.precision import without_autocast

__all__ = ["HeadCodes", "core_attention", "to_output_code", "written_out"]


class HeadCodes(NamedTuple):
    """A query, a key, a value, or what attention makes of a value: ``code @ right``, head by head."""

    code: Tensor
    """``(B, T, R)`` for all heads, or ``(B, H, T, R)``."""
    right: Tensor
    """``(R, H * D)``, in the dtype of ``code``; a bias is a row of it."""
    num_heads: int
    cache: object = None
    """What codes in a cache have in common: it lives for as long as they do."""

    def by_head(self) -> Tensor:
        """``right`` as ``(H, R, D)``."""
        return self.right.unflatten(1, (self.num_heads, -1)).transpose(0, 1)

    def widened(self, rank: int) -> "HeadCodes":
        """The same with a code of ``rank`` numbers."""
        extra = rank - self.code.shape[-1]
        if extra == 0:
            return self
        return self._replace(code=pad(self.code, (0, extra)), right=pad(self.right, (0, 0, 0, extra)))


def core_attention(
    query: HeadCodes,
    key: HeadCodes,
    value: HeadCodes,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> HeadCodes:
    """What each head makes of the value; options as of ``torch.nn.functional.scaled_dot_product_attention``.

    Shape:
        query ``(B, T, R_q)``, key ``(B, S, R_k)``, value ``(B, S, R_v)`` -> ``(B, H, T, R)``, where R is the larger of
        ``R_k`` and ``R_v``: fused kernels want keys and values of one width.
    """
    rank = max(key.code.shape[-1], value.code.shape[-1])
    heads, key, value = query.num_heads, key.widened(rank), value.widened(rank)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query.code.dtype)  # as autocast does
    scale = (query.right.shape[1] // heads) ** -0.5 if scale is None else scale
    with without_autocast(query.code):
        query_BTHR = _query_for_codes(query, key)
        parts = query_BTHR, key.code, value.code
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
        scores = (*query_BTHR.shape[:3], key.code.shape[1])
        served = kept_bits.serves(query_BTHR.device, prod(scores), dropout)
        if served and (mask is None or not mask.requires_grad):
            bits = kept_bits.draw_kept(scores, dropout)
            share = kept_bits.kept_share(dropout)
            context_BTHR = dropped_attention(*parts, bits, mask, share=share, **options)
        else:
            context_BTHR = _fused_attention(*parts, mask, dropout=dropout, **options)
    return HeadCodes(context_BTHR.transpose(1, 2), value.right, heads)


def _query_for_codes(query: HeadCodes, key: HeadCodes) -> Tensor:
    """What a code of the key is multiplied by to give a score, ``(B, T, H, R_k)``."""
    heads, rank, size = query.num_heads, key.code.shape[-1], query.right.shape[1] // query.num_heads
    if _mixing_pays(query.code.shape[:2].numel(), query.code.shape[-1], size, rank):
        mixing_HRR = query.by_head() @ key.by_head().transpose(1, 2)
        return (query.code @ mixing_HRR.transpose(0, 1).flatten(1)).unflatten(-1, (heads, rank))
    query_HND = (query.code.flatten(0, 1) @ query.right).unflatten(-1, (heads, size)).transpose(0, 1)
    query_HNR = query_HND @ key.by_head().transpose(1, 2)
    return query_HNR.transpose(0, 1).unflatten(0, query.code.shape[:2])


def _mixing_pays(rows: int, rank: int, size: int, other_rank: int) -> bool:
    """Whether halves ``(rank, size)`` and ``(size, other_rank)`` are better multiplied before ``rows`` rows come.

    Behind a cache there is one row for each text, and what a head makes of it is cheaper to write out.
    """
    return rank * size * other_rank + rows * rank * other_rank <= rows * size * (rank + other_rank)


def _fused_attention(
    query_BTHR: Tensor,
    key_BSR: Tensor,
    value_BSR: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """By torch's kernel, as ``(B, T, H, R)``.

    Heads of a single token are handed over as rows of one head: they share key and value, which then are read once.
    """
    dtype = query_BTHR.dtype
    if query_BTHR.device.type == "cpu":  # whose kernel, where tried, was up to five times slower in 16 bits
        exact = torch.promote_types(dtype, torch.float32)
        query_BTHR, key_BSR, value_BSR = query_BTHR.to(exact), key_BSR.to(exact), value_BSR.to(exact)
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(exact)
    tokens, heads = query_BTHR.shape[1:3]
    as_rows = tokens == 1 and not is_causal and (mask is None or mask.ndim < 3 or mask.shape[-3] == 1)
    context_BHTR = scaled_dot_product_attention(
        query_BTHR if as_rows else query_BTHR.transpose(1, 2),
        key_BSR.unsqueeze(1).expand(-1, 1 if as_rows else heads, -1, -1),
        value_BSR.unsqueeze(1).expand(-1, 1 if as_rows else heads, -1, -1),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
    )
    return (context_BHTR if as_rows else context_BHTR.transpose(1, 2)).to(dtype)


def to_output_code(context: HeadCodes, left: Tensor) -> Tensor:
    """The code of the output layer, whose ``left`` half is ``(R_o, H * D)``, for what attention has made.

    Shape:
        ``(B, H, T, R) -> (B, T, R_o)``.
    """
    batch, heads, tokens, rank = context.code.shape
    size = left.shape[1] // heads
    with without_autocast(left):
        if not _mixing_pays(batch * tokens, rank, size, left.shape[0]):
            return written_out(context).to(left.dtype) @ left.T
        mixing_HRR = context.by_head().to(left.dtype) @ left.unflatten(1, (heads, size)).permute(1, 2, 0)
        return context.code.transpose(1, 2).flatten(2).to(left.dtype) @ mixing_HRR.flatten(0, 1)


def written_out(codes: HeadCodes) -> Tensor:
    """What they stand for.

    Shape:
        ``(B, T, R)`` or ``(B, H, T, R) -> (B, T, H * D)``.
    """
    with without_autocast(codes.code):
        if codes.code.ndim == 4:
            return (codes.code @ codes.by_head()).transpose(1, 2).flatten(2)
        return codes.code @ codes.right
