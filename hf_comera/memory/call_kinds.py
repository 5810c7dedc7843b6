"""Which calls of torch can be made again in backward, and what kind of tensor each gives; tables of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import hf_comera.ops.dropped_attention  # noqa: F401  registers the operator
from hf_comera.modules.lazy_weight import FREE_QUESTIONS
from hf_comera.ops.kept_bits import drop

__all__ = [
    "QUESTIONS",
    "UNRECORDED",
    "apply_mask",
    "autocasts",
    "draws_in_attention",
    "dropped_share",
    "is_product",
    "kind_of",
    "needs_exact",
    "weight_among",
    "writes_arguments",
]

_OWNERS = (torch, Tensor, functional, torch.special)


def _all(names: str) -> Iterable[Callable[..., Any]]:
    """Every function or method of torch that has one of these names."""
    return (getattr(owner, name) for name in names.split() for owner in _OWNERS if hasattr(owner, name))


_FACTORIES = {*_all("zeros ones full arange")}
"""Calls without tensors that can be told which dtype and device they have had."""
_FUNCTIONS = {
    *_all("mul div true_divide neg pow square sqrt rsqrt reciprocal exp log log1p expm1 tanh sigmoid erf sin cos abs"),
    *_all("relu gelu silu leaky_relu elu mish hardswish hardsigmoid hardtanh relu6 softplus logsigmoid softsign"),
    *_all("clamp clamp_min clamp_max where masked_fill maximum minimum eq ne lt le gt ge logical_and logical_not"),
    *_all("logical_or bitwise_and bitwise_or bitwise_not to float half bfloat16 double type type_as int long bool"),
    *_all("softmax mean sum cat stack concat clone contiguous reshape flatten pad roll repeat repeat_interleave"),
    *_FACTORIES,
    *_all("zeros_like ones_like full_like new_zeros new_ones new_full tril triu cumsum"),
    *_all("embedding index_select gather outer"),
    *_all(
        "__and__ __or__ __invert__ __rsub__ __rpow__ __rtruediv__ __rdiv__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
    ),
}
_SUMS = {*_all("add sub")}
_NORMS = {*_all("layer_norm rms_norm group_norm normalize")}
_PRODUCTS = {*_all("linear matmul mm bmm addmm baddbmm __matmul__")}
_DROPOUTS = {functional.dropout}
_ATTENTIONS = {functional.scaled_dot_product_attention}

_EXACT = {
    *_all("log_softmax logsumexp logaddexp log log2 log10 log1p sqrt rsqrt reciprocal div true_divide cumprod prod"),
    *_all("__truediv__ __rtruediv__ acos asin atanh lgamma digamma dist cdist norm cosine_similarity"),
    *_all("pairwise_distance normalize log_sigmoid kl_div xlogy entr"),
    *(getattr(functional, name) for name in dir(functional) if name.endswith(("_loss", "_entropy", "_with_logits"))),
}

_VIEWS = {
    *_all("view view_as transpose permute unsqueeze squeeze expand expand_as chunk split unbind narrow select"),
    *_all("detach t unflatten swapaxes movedim __getitem__"),
}
QUESTIONS = FREE_QUESTIONS | {Tensor.requires_grad.__get__, Tensor.grad_fn.__get__}
UNRECORDED = QUESTIONS | _VIEWS | {Tensor.T.__get__}
"""Questions, and views: a view is told from its storage."""

_KINDS: dict[Any, str] = {
    **dict.fromkeys(_FUNCTIONS, "functions"),
    **dict.fromkeys(_SUMS, "sums"),
    **dict.fromkeys(_NORMS, "norms"),
    **dict.fromkeys(_DROPOUTS, "dropout"),
    **dict.fromkeys(_ATTENTIONS, "attention"),
    torch.ops.hf_comera.dropped_attention.default: "attention",
    drop: "functions",  # nothing is drawn in it
}

_THIN = 4
"""How many times wider the output of a thin product is than its inner size, at least."""


def is_product(func: Any) -> bool:
    """Whether the call multiplies matrices; attention, which does more, not included."""
    return func in _PRODUCTS


def needs_exact(func: Any) -> bool:
    """Whether backward of the call exponentiates or divides by what it saves, or subtracts it from its like.

    There FP8's rounding of a few percent becomes any error: exp of a log-probability of -20, 1 / (p + 1e-7).
    """
    return func in _EXACT


def autocasts(func: Any) -> bool:
    """Whether autocast casts what the call is given to its dtype."""
    return func in _PRODUCTS or func in _ATTENTIONS


def weight_among(func: Any, args: Sequence[Any]) -> Tensor | None:
    """What a product takes as its weight: the second factor, if it is a matrix."""
    if func not in _PRODUCTS:
        return None
    index = 2 if func in _ADDED else 1
    weight = args[index] if len(args) > index else None
    return weight if type(weight) in (Tensor, torch.nn.Parameter) and weight.ndim == 2 else None


def draws_in_attention(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call is core attention with dropout."""
    return func in _ATTENTIONS and bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def dropped_share(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """The ``p`` of a call of dropout."""
    return float(kwargs.get("p", args[1] if len(args) > 1 else 0.5))


def writes_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call changes what it is given, as looking up an embedding with a largest norm does."""
    max_norm = kwargs.get("max_norm", args[3] if len(args) > 3 else None)
    return func is functional.embedding and max_norm is not None


def apply_mask(x: Tensor, mask: Tensor, kept_share: float) -> Tensor:
    """What dropout does with the entries that it has drawn: a mask of bools, or one that is scaled already."""
    return x * mask * (1 / kept_share) if mask.dtype == torch.bool else x * mask


def kind_of(func: Any, tensors: Sequence[Tensor], out: Tensor) -> str | None:
    """``"products"``, ``"functions"``, ``"norms"``, ``"sums"``, ``"scores"``, ``"attention"`` or ``"dropout"``.

    Returns:
        None for a call that cannot be made again, or would cost too much.
    """
    if not tensors and func not in _FACTORIES:  # ``torch.div(7, 2)``, whose dtype is a setting of torch
        return None
    if func in _SUMS:
        return "sums" if sum(tensor.shape == out.shape for tensor in tensors) > 1 else "functions"
    if func in _PRODUCTS:
        return _kind_of_product(func, tensors, out)
    return _KINDS.get(func)


def _kind_of_product(func: Any, tensors: Sequence[Tensor], out: Tensor) -> str | None:
    if len(tensors) < 2 or out.ndim == 0:
        return None
    left, right = tensors[-2:] if func in _ADDED else tensors[:2]
    if right.ndim > 2:
        return "scores" if left.ndim == right.ndim else None
    return "products" if _THIN * left.shape[-1] < out.shape[-1] else None


_ADDED = {*_all("addmm baddbmm")}
"""Products whose first argument is what they are added to."""
