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

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hf_comera.ops.precision import without_autocast

__all__ = ["CodeAttention", "HeadProjection", "context_heads", "context_to_code", "core_attention"]


class HeadProjection(NamedTuple):
    """A query, a key or a value: ``code @ right``, in heads."""

    code: Tensor
    """``(B, T, R)``."""
    right: Tensor
    """``(R, H * D)``, in the dtype of ``code``; a bias is a row of it."""
    num_heads: int

    def by_head(self) -> Tensor:
        """``right`` as ``(H, R, D)``."""
        return self.right.unflatten(1, (self.num_heads, -1)).transpose(0, 1)

    def widened(self, rank: int) -> "HeadProjection":
        """The same with a code of ``rank`` numbers."""
        extra = rank - self.code.shape[-1]
        if extra == 0:
            return self
        return HeadProjection(pad(self.code, (0, extra)), pad(self.right, (0, 0, 0, extra)), self.num_heads)


class CodeAttention(NamedTuple):
    """What core attention is given."""

    query: HeadProjection
    key: HeadProjection
    value: HeadProjection
    mask: Tensor | None = None
    """As in ``torch.nn.functional.scaled_dot_product_attention``; so are the others."""
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None


def core_attention(given: CodeAttention) -> Tensor:
    """What each head makes of the codes of the value.

    Shape:
        query ``(B, T, R_q)``, key ``(B, S, R_k)``, value ``(B, S, R_v)`` -> ``(B, H, T, R)``, where R is the larger of
        ``R_k`` and ``R_v``: fused kernels want keys and values of one width.
    """
    rank = max(given.key.code.shape[-1], given.value.code.shape[-1])
    query, key, value = given.query, given.key.widened(rank), given.value.widened(rank)
    heads, mask = query.num_heads, given.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query.code.dtype)  # as autocast does
    with without_autocast(query.code):
        mixing_HRR = query.by_head() @ key.by_head().transpose(1, 2)
        query_BTR = query.code @ mixing_HRR.transpose(0, 1).flatten(1)
        return scaled_dot_product_attention(
            query_BTR.unflatten(-1, (heads, rank)).transpose(1, 2),
            key.code.unsqueeze(1).expand(-1, heads, -1, -1),
            value.code.unsqueeze(1).expand(-1, heads, -1, -1),
            attn_mask=mask,
            dropout_p=given.dropout,
            is_causal=given.is_causal,
            scale=(query.right.shape[1] // heads) ** -0.5 if given.scale is None else given.scale,
        )


def context_to_code(context_BHTR: Tensor, value: HeadProjection, left: Tensor) -> Tensor:
    """The code of the output layer, whose ``left`` half is ``(R_o, H * D)``, for what :func:`core_attention` gave.

    Shape:
        ``(B, H, T, R) -> (B, T, R_o)``.
    """
    by_head = value.widened(context_BHTR.shape[-1]).by_head()
    with without_autocast(left):
        mixing_HRR = by_head.to(left.dtype) @ left.unflatten(1, (value.num_heads, -1)).permute(1, 2, 0)
        return context_BHTR.transpose(1, 2).flatten(2).to(left.dtype) @ mixing_HRR.flatten(0, 1)


def context_heads(context_BHTR: Tensor, value: HeadProjection) -> Tensor:
    """What attention without codes gives.

    Shape:
        ``(B, H, T, R) -> (B, H, T, D)``.
    """
    with without_autocast(context_BHTR):
        return context_BHTR @ value.widened(context_BHTR.shape[-1]).by_head()
