"""Stand-ins for query, key and value and for what core attention makes of them, none of which is written out.

A projection returns its code in the guise of its output; splitting it into heads is written down. Core attention of
three such is computed over their codes (``ops/code_attention.py``) and gives another, which the output layer takes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from hf_comera.modules.cached_codes import copied, cropped_or_selected, put_together
from hf_comera.modules.unwritten import Unwritten
from hf_comera.ops.code_attention import HeadCodes, core_attention, to_output_code, written_out
from hf_comera.ops.gradients import gradients_of
from hf_comera.ops.halves import RANK_MULTIPLE
from hf_comera.ops.precision import autocast_input
from hf_comera.ops.tt_linear import bias_as_rank

__all__ = ["UnwrittenHeads", "is_worth_codes"]

# Entries of a projection from which on attention over codes has been faster on a CPU; below, stand-ins cost more.
WORTH_CODES = 1 << 18

_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape}
_PRODUCTS = {Tensor.mul, Tensor.__mul__, torch.mul}
_TRANSPOSES = {Tensor.transpose, torch.transpose}
_FLAT, _BY_TOKEN, _BY_HEAD = "flat", "by token", "by head"
"""``(B, T, H * D)``, ``(B, T, H, D)`` and ``(B, H, T, D)``."""


def is_worth_codes(rows: int, out_features: int) -> bool:
    """Whether attention over codes is faster for ``rows`` rows of projections of ``out_features``."""
    return rows * out_features >= WORTH_CODES


class UnwrittenHeads(Unwritten):
    """Codes of a query, a key, a value or of what attention makes of them, in heads or not.

    What is written to it in place does not show in views that were made before.

    Shape:
        ``(B, T, H * D)``, ``(B, T, H, D)`` or ``(B, H, T, D)``.
    """

    _codes: HeadCodes
    _layout: str

    @staticmethod
    def __new__(cls, codes: HeadCodes, layout: str) -> UnwrittenHeads:
        """Make the stand-in, without a gradient; :func:`_stand_in` links one to the codes."""
        stand_in: UnwrittenHeads = cls._empty(_shapes(codes)[layout], codes.code.dtype, codes.code.device)
        stand_in._codes, stand_in._layout = codes, layout
        return stand_in

    @classmethod
    def of(cls, code: Tensor, right: Tensor, num_heads: int, cache: object = None) -> UnwrittenHeads:
        """The stand-in for ``code @ right``, code ``(B, T, R)``; ``cache`` lives while it waits in one."""
        return _stand_in(HeadCodes(code, right.to(code.dtype), num_heads, cache), _FLAT)

    @classmethod
    def of_bias(cls, x: Tensor, features: int, bias: Tensor | None, num_heads: int) -> UnwrittenHeads:
        """The stand-in for what a layer without ranks makes of ``x``: its bias for every row, or zeros."""
        zeros = autocast_input(x).new_zeros(*x.shape[:-1], RANK_MULTIPLE)
        code, right, _ = bias_as_rank(zeros, zeros.new_zeros(RANK_MULTIPLE, features), bias, 0, always=True)
        return cls.of(code, right, num_heads)

    def stays_unwritten(self, left: Tensor) -> bool:
        """Besides, whether this is what attention has made, in the layout of an input."""
        return super().stays_unwritten(left) and self._codes.code.ndim == 4 and self._layout == _FLAT

    def code(self, left: Tensor) -> Tensor:
        """``self @ left.T``, from the codes of what attention has made."""
        return to_output_code(self._codes, left)

    def _made(self) -> Tensor:
        return _arranged(self._codes, self._layout)

    @classmethod
    def _written_down(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is Tensor.split:
            return _split(*args, **kwargs)
        if func is torch.cat:
            return _joined(*args, **kwargs)
        x = args[0] if args else None
        if not isinstance(x, UnwrittenHeads) or not x.can_be_written_down():
            return NotImplemented
        if func is Tensor.__deepcopy__:
            return _stand_in(copied(x._codes, *args[1:]), x._layout)
        if x._layout == _BY_HEAD and (cached := cropped_or_selected(x._codes, func, args[1:], kwargs)) is not None:
            return _stand_in(cached, _BY_HEAD)
        if kwargs:
            return NotImplemented
        if func is Tensor.contiguous:
            return x
        if func in _PRODUCTS and len(args) == 2 and type(args[1]) in (int, float):
            return _stand_in(x._codes._replace(code=x._codes.code * args[1]), x._layout)
        layout = None
        if func in _RESHAPES:
            layout = _reshaped(x, args[1:])
        elif func in _TRANSPOSES and x._layout != _FLAT and set(args[1:]) <= {1, 2, -2, -3} and _swaps(args[1:]):
            layout = _BY_HEAD if x._layout == _BY_TOKEN else _BY_TOKEN
        return NotImplemented if layout is None else _stand_in(x._codes, layout)


class _Link(torch.autograd.Function):
    """Gives the stand-in a gradient path, so that a custom function cannot lose gradients silently."""

    @staticmethod
    def forward(ctx: Any, num_heads: int, layout: str, code: Tensor, right: Tensor) -> UnwrittenHeads:
        ctx.num_heads, ctx.layout = num_heads, layout
        ctx.save_for_backward(code, right)
        return UnwrittenHeads(HeadCodes(code, right, num_heads), layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        def whole(aliases: list[Any]) -> Tensor:
            return _arranged(HeadCodes(*aliases, ctx.num_heads), ctx.layout)

        create_graph = torch.is_grad_enabled()
        return (None, None, *gradients_of(whole, ctx.saved_tensors, grads[0], create_graph=create_graph))


def _stand_in(codes: HeadCodes, layout: str) -> UnwrittenHeads:
    code, right = codes.code, codes.right
    if not torch.is_grad_enabled():
        # the very tensors where they can be: a cache tells by them what keys and values share
        return UnwrittenHeads(codes._replace(code=_without_gradient(code), right=_without_gradient(right)), layout)
    stand_in: UnwrittenHeads = _Link.apply(codes.num_heads, layout, code, right)
    stand_in._codes = codes  # those with a gradient
    return stand_in


def _without_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _shapes(codes: HeadCodes) -> dict[str, tuple[int, ...]]:
    """Of each layout."""
    batch, tokens, heads = codes.code.shape[0], codes.code.shape[-2], codes.num_heads
    size = codes.right.shape[1] // heads
    return {
        _FLAT: (batch, tokens, heads * size),
        _BY_TOKEN: (batch, tokens, heads, size),
        _BY_HEAD: (batch, heads, tokens, size),
    }


def _arranged(codes: HeadCodes, layout: str) -> Tensor:
    """The real tensor."""
    flat, shapes = written_out(codes), _shapes(codes)
    if layout == _BY_HEAD:
        return flat.view(shapes[_BY_TOKEN]).transpose(1, 2)
    return flat.view(shapes[layout])


def _swaps(dims: Sequence[int]) -> bool:
    """Whether these are the second and the third of four dimensions."""
    return sorted(dim % 4 for dim in dims) == [1, 2]


def _reshaped(x: UnwrittenHeads, sizes: tuple[Any, ...]) -> str | None:
    """The layout of ``x`` in other sizes, or None if it has none for them."""
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = tuple(sizes[0])
    if not all(isinstance(size, int) for size in sizes):
        return None
    rest = math.prod(size for size in sizes if size != -1)
    sizes = tuple(x.numel() // max(1, rest) if size == -1 else size for size in sizes)
    if sizes == tuple(x.shape):
        return x._layout
    shapes = _shapes(x._codes)
    others = [] if x._layout == _BY_HEAD else [_FLAT, _BY_TOKEN]
    return next((layout for layout in others if shapes[layout] == sizes), None)


def _split(x: UnwrittenHeads, split_size: Any, dim: int = 0) -> Any:
    """Parts of whole heads, as of a layer that gives query, key and value side by side."""
    size = x._codes.right.shape[1] // x._codes.num_heads
    in_heads = x._layout == _FLAT and dim in (-1, 2) and isinstance(split_size, int) and split_size > 0
    if not in_heads or split_size % size or not x.can_be_written_down():
        return NotImplemented
    rights = x._codes.right.split(split_size, dim=1)
    parts = (x._codes._replace(right=right, num_heads=right.shape[1] // size) for right in rights)
    return tuple(_stand_in(part, _FLAT) for part in parts)


def _joined(tensors: Any, dim: int = 0) -> Any:
    """What a cache makes of keys or values: those of later tokens behind those of earlier ones."""
    parts = [part for part in tensors if part.shape != (0,)]
    known = all(isinstance(part, UnwrittenHeads) and part._layout == _BY_HEAD for part in parts)
    if not known or dim not in (-2, 2) or not all(part.can_be_written_down() for part in parts):
        return NotImplemented
    codes = put_together([part._codes for part in parts])
    return NotImplemented if codes is None else _stand_in(codes, _BY_HEAD)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Core attention over codes; NotImplemented if these are not projections in heads that match."""
    parts = (query, key, value)
    if enable_gqa or type(attn_mask) not in (type(None), Tensor, torch.nn.Parameter, FakeTensor):
        return NotImplemented
    for part in parts:
        if not isinstance(part, UnwrittenHeads) or not part.can_be_written_down() or part._layout != _BY_HEAD:
            return NotImplemented
    matching = {(part.shape[0], part.shape[1], part.shape[3], part.dtype, part._codes.code.ndim) for part in parts}
    if len(matching) > 1 or key.shape[2] != value.shape[2] or query._codes.code.ndim == 4:
        return NotImplemented
    if attn_mask is not None and not _is_mask(attn_mask, (*query.shape[:3], key.shape[2])):
        return NotImplemented
    codes = [part._codes for part in parts]
    context = core_attention(*codes, attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale)
    return _stand_in(context, _BY_HEAD)


def _is_mask(mask: Tensor, scores: tuple[int, ...]) -> bool:
    """Whether it is one for scores of this shape; for others torch has errors."""
    if mask.ndim > 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return False
    sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
    return all(size in (1, wanted) for size, wanted in sizes)
