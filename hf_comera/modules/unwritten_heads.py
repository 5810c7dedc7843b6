"""Stand-ins for query, key and value and for what core attention makes of them, none of which is written out.

A projection returns its code in the guise of its output; splitting it into heads is written down, and so is core
attention of three such. The output layer then carries it out over codes (``ops/code_attention.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from hf_comera.modules.unwritten import Unwritten
from hf_comera.ops.code_attention import (
    CodeAttention,
    HeadProjection,
    context_heads,
    context_to_code,
    core_attention,
)
from hf_comera.ops.gradients import gradients_of
from hf_comera.ops.tt_linear import from_code

__all__ = ["UnwrittenHeads", "is_worth_codes"]

# Entries of a projection from which on attention over codes has been faster on a CPU; below, stand-ins cost more.
WORTH_CODES = 1 << 18

_Recipe = HeadProjection | CodeAttention

_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape}
_TRANSPOSES = {Tensor.transpose, torch.transpose}
_FLAT, _BY_TOKEN, _BY_HEAD = "flat", "by token", "by head"
"""``(B, T, H * D)``, ``(B, T, H, D)`` and ``(B, H, T, D)``."""


def is_worth_codes(rows: int, out_features: int) -> bool:
    """Whether attention over codes is faster for ``rows`` rows of projections of ``out_features``."""
    return rows * out_features >= WORTH_CODES


class UnwrittenHeads(Unwritten):
    """A projection of codes, or what core attention makes of three, in heads or not.

    Shape:
        ``(B, T, H * D)``, ``(B, T, H, D)`` or ``(B, H, T, D)``.
    """

    _recipe: _Recipe
    _layout: str
    _mask_version: int | None

    @staticmethod
    def __new__(cls, recipe: _Recipe, layout: str) -> UnwrittenHeads:
        """Make the stand-in, without a gradient; :func:`_stand_in` links one to the codes."""
        code = _query_of(recipe).code
        stand_in: UnwrittenHeads = cls._empty(_shapes(recipe)[layout], code.dtype, code.device)
        stand_in._recipe, stand_in._layout = recipe, layout
        stand_in._mask_version = _version_of_mask(recipe)
        return stand_in

    @classmethod
    def of(cls, code: Tensor, right: Tensor, num_heads: int) -> UnwrittenHeads:
        """The stand-in for ``code @ right``, code ``(B, T, R)``."""
        right = right.to(code.dtype)
        if not torch.is_grad_enabled():
            code, right = code.detach(), right.detach()
        return _stand_in(HeadProjection(code, right, num_heads), _FLAT)

    def stays_unwritten(self, left: Tensor) -> bool:
        """Besides, whether this is what attention has made, in the layout of an input."""
        return super().stays_unwritten(left) and isinstance(self._recipe, CodeAttention) and self._layout == _FLAT

    def code(self, left: Tensor) -> Tensor:
        """``self @ left.T``, by attention over codes."""
        assert isinstance(self._recipe, CodeAttention)
        self._check_mask()
        return context_to_code(core_attention(self._recipe), self._recipe.value, left)

    def _made(self) -> Tensor:
        self._check_mask()
        return _whole(self._recipe, self._layout)

    def _check_mask(self) -> None:
        """What attention was given is taken in later: it must still be what it was."""
        if _version_of_mask(self._recipe) != self._mask_version:
            raise RuntimeError(
                "The mask of scaled_dot_product_attention was changed in place before what attention gave was used. "
                "Change a copy of the mask, or use the output of attention first."
            )

    @classmethod
    def _written_down(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        x = args[0] if args else None
        if kwargs or not isinstance(x, UnwrittenHeads) or not _is_usable(x):
            return NotImplemented
        if func is Tensor.contiguous:
            return x
        layout = None
        if func in _RESHAPES:
            layout = _reshaped(x, args[1:])
        elif func in _TRANSPOSES and x._layout != _FLAT and sorted(dim % 4 for dim in args[1:]) == [1, 2]:
            layout = _BY_HEAD if x._layout == _BY_TOKEN else _BY_TOKEN
        return NotImplemented if layout is None else _stand_in(x._recipe, layout)


class _Link(torch.autograd.Function):
    """Gives the stand-in a gradient path, so that a custom function cannot lose gradients silently."""

    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, layout: str, *tensors: Tensor | None) -> UnwrittenHeads:
        ctx.template, ctx.layout = _filled(recipe, [None] * len(tensors)), layout
        ctx.save_for_backward(*tensors)
        return UnwrittenHeads(recipe, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if isinstance(ctx.template, CodeAttention) and ctx.template.dropout:
            raise RuntimeError(
                "A custom autograd function took what attention with dropout gave, and now asks for its gradient, "
                "which cannot be had without the entries that were dropped. Pass it a copy: output.clone()."
            )

        def whole(aliases: list[Any]) -> Tensor:
            return _whole(_filled(ctx.template, aliases), ctx.layout)

        create_graph = torch.is_grad_enabled()
        return (None, None, *gradients_of(whole, ctx.saved_tensors, grads[0], create_graph=create_graph))


def _stand_in(recipe: _Recipe, layout: str) -> UnwrittenHeads:
    return _Link.apply(recipe, layout, *_tensors(recipe))


def _tensors(recipe: _Recipe) -> list[Tensor | None]:
    if isinstance(recipe, HeadProjection):
        return [recipe.code, recipe.right]
    return [*_tensors(recipe.query), *_tensors(recipe.key), *_tensors(recipe.value), recipe.mask]


def _filled(recipe: _Recipe, tensors: list[Any]) -> Any:
    """``recipe`` with other tensors, in the order of :func:`_tensors`."""
    if isinstance(recipe, HeadProjection):
        return recipe._replace(code=tensors[0], right=tensors[1])
    query, key, value = (_filled(part, tensors[2 * index : 2 * index + 2]) for index, part in enumerate(recipe[:3]))
    return recipe._replace(query=query, key=key, value=value, mask=tensors[6])


def _query_of(recipe: _Recipe) -> HeadProjection:
    return recipe.query if isinstance(recipe, CodeAttention) else recipe


def _version_of_mask(recipe: _Recipe) -> int | None:
    mask = recipe.mask if isinstance(recipe, CodeAttention) else None
    return None if mask is None or mask.is_inference() else mask._version


def _shapes(recipe: _Recipe) -> dict[str, tuple[int, ...]]:
    """Of each layout."""
    query = _query_of(recipe)
    (batch, tokens, _), heads = query.code.shape, query.num_heads
    size = query.right.shape[1] // heads
    return {
        _FLAT: (batch, tokens, heads * size),
        _BY_TOKEN: (batch, tokens, heads, size),
        _BY_HEAD: (batch, heads, tokens, size),
    }


def _whole(recipe: _Recipe, layout: str) -> Tensor:
    """The real tensor."""
    if isinstance(recipe, HeadProjection):
        flat = from_code(recipe.code, recipe.right)
    else:
        flat = context_heads(core_attention(recipe), recipe.value).transpose(1, 2).flatten(2)
    shapes = _shapes(recipe)
    if layout == _BY_HEAD:
        return flat.view(shapes[_BY_TOKEN]).transpose(1, 2)
    return flat.view(shapes[layout])


def _is_usable(x: UnwrittenHeads) -> bool:
    """Whether something may be written down of ``x``: it is not real yet, nor would get back a gradient it lost."""
    return x._real is None and (torch.is_grad_enabled() or not x.requires_grad)


def _reshaped(x: UnwrittenHeads, sizes: tuple[Any, ...]) -> str | None:
    """The layout of ``x`` in other sizes, or None if it has none for them."""
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = tuple(sizes[0])
    rest = math.prod(size for size in sizes if size != -1)
    sizes = tuple(x.numel() // max(1, rest) if size == -1 else size for size in sizes)
    if sizes == tuple(x.shape):
        return x._layout
    shapes = _shapes(x._recipe)
    others = [] if x._layout == _BY_HEAD else [_FLAT, _BY_TOKEN]
    return next((layout for layout in others if shapes[layout] == sizes), None)


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
    """Core attention of stand-ins, written down; NotImplemented if these are not projections in heads that match."""
    if enable_gqa or not 0 <= dropout_p < 1 or type(attn_mask) not in (type(None), Tensor, FakeTensor):
        return NotImplemented
    recipes = []
    for part in (query, key, value):
        if not isinstance(part, UnwrittenHeads) or not _is_usable(part) or part._layout != _BY_HEAD:
            return NotImplemented
        recipes.append(part._recipe)
    if any(isinstance(recipe, CodeAttention) for recipe in recipes):
        return NotImplemented
    matching = {(part.shape[0], part.shape[1], part.shape[3], part.dtype) for part in (query, key, value)}
    if len(matching) > 1 or key.shape[2] != value.shape[2]:
        return NotImplemented
    return _stand_in(CodeAttention(*recipes, attn_mask, dropout_p, is_causal, scale), _BY_HEAD)
