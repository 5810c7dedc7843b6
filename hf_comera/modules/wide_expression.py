"""An entry-by-entry function of hidden layers, written down, and which of those that kernels know it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_comera.ops.wide_input import WideForm

__all__ = ["Call", "Leaf", "Pointwise", "form_of", "keep", "structure"]

_PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}


@dataclass(eq=False)
class Call:
    """A function of expressions and numbers; expressions end in leaves."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Leaf:
    """Where an expression takes in a linear map, or the entries that dropout keeps."""


class Pointwise:
    """An expression in the autocast mode that it was written in; it holds no tensors."""

    def __init__(self, expression: Any, leaves: Sequence[Leaf], kind: str) -> None:
        self.expression, self.leaves, self.kind = expression, leaves, kind
        self.autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def __call__(self, wides: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
        """The expression on some rows of its inputs and masks."""
        values = {id(leaf): value for leaf, value in zip(self.leaves, [*wides, *masks], strict=True)}
        if self.autocast_dtype is None:
            return _evaluate(self.expression, values)
        with torch.autocast(self.kind, self.autocast_dtype):
            return _evaluate(self.expression, values)


def keep(wide: Tensor, keeps: Tensor, scale: float) -> Tensor:
    """Dropout, for entries that are already drawn."""
    return wide * keeps * scale


def form_of(
    expression: Any, inputs: Sequence[Leaf], masks: Sequence[Leaf], activations: Mapping[Any, str]
) -> WideForm | None:
    """What a kernel is to compute in place of ``expression``, or None where there is none that does.

    Args:
        expression: Of the leaves.
        inputs: Leaves of linear maps.
        masks: Leaves of dropout.
        activations: Names by the :func:`structure` of expressions of one leaf.
    """
    scale = None
    if isinstance(expression, Call) and expression.function is keep:
        expression, _, scale = expression.args
    factors = [expression]
    if isinstance(expression, Call) and expression.function in _PRODUCTS and len(inputs) == 2:
        factors = [*expression.args, *expression.kwargs.values()]
    if len(factors) != len(inputs) or len(masks) != (scale is not None):
        return None
    for activated, *gate in (factors, factors[::-1]):
        leaves = [*dict.fromkeys(_leaves(activated)), *gate]
        if structure(activated) in activations and len(leaves) == len(inputs) and set(leaves) == set(inputs):
            return WideForm(activations[structure(activated)], tuple(map(inputs.index, leaves)), scale)
    return None


def structure(expression: Any) -> Any:
    """Nested tuples, equal for expressions that differ in nothing but their leaves."""
    if isinstance(expression, Leaf):
        return Leaf
    if not isinstance(expression, Call):
        return expression
    kwargs = ((name, structure(value)) for name, value in sorted(expression.kwargs.items()))
    return expression.function, tuple(map(structure, expression.args)), tuple(kwargs)


def _leaves(expression: Any) -> Iterator[Leaf]:
    if isinstance(expression, Leaf):
        yield expression
    if isinstance(expression, Call):
        for part in (*expression.args, *expression.kwargs.values()):
            yield from _leaves(part)


def _evaluate(expression: Any, values: dict[int, Tensor]) -> Any:
    """The value of ``expression``; parts that occur twice are computed once."""
    if id(expression) in values:
        return values[id(expression)]
    if not isinstance(expression, Call):
        return expression
    args = [_evaluate(value, values) for value in expression.args]
    kwargs = {name: _evaluate(value, values) for name, value in expression.kwargs.items()}
    values[id(expression)] = expression.function(*args, **kwargs)
    return values[id(expression)]
