"""Multi-head latent attention with absorbed projections: keys and values stay latents of r numbers a token.

With ``query = latent_q @ right_q`` and ``key = latent_k @ right_k``, the scores of a head are ``latent_q M
latent_k.T`` with a small ``M = right_q right_k.T``. So all heads share one key, ``latent_k``, and one value,
``latent_v``, as in multi-query attention. Each head's context is a latent too and goes to the output layer by
``right_v left_o.T``.

Exact up to rounding, with any mask and dropout.

Source: absorbed projections: DeepSeek-V2, arXiv:2405.04434, section 2.1; one key and value for all heads: Shazeer,
arXiv:1911.02150.
"""

# Shapes here: B = batch, T = tokens, S = tokens of key and value, H = heads, G = heads of key and value,
# D = head size, R = numbers of a latent, N = rows.

import torch
from torch import Tensor

from hf_comera.ops.precision import without_autocast

__all__ = ["absorbed_query", "output_latent"]


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
