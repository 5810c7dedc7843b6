"""Sibling layers that read the same input, as query, key and value do, share one product into their rank spaces."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_comera.modules.stamp import can_keep
from hf_comera.ops.tt_linear import to_code

if TYPE_CHECKING:
    from hf_comera.modules.tt_linear import TTLinear

__all__ = ["JoinedProjections"]


class JoinedProjections:
    """Siblings in the order in which a model calls them; the first to be called makes the codes of all.

    A code waits until its layer is called with the very tensor that it was made from. A layer that gets another one
    makes its own code. A copied or pickled group is new; the copies of its members join it again.
    """

    def __init__(self) -> None:
        self._members: list[weakref.ref[TTLinear]] = []
        self._waiting: dict[int, Tensor] = {}
        self._made_from: tuple[weakref.ref[Tensor], int, bool] | None = None
        self.num_wasted = 0
        """Codes that were made and never asked for, since the training mode was last set."""
        self.num_joined = 0
        """Codes that were made with that of a sibling, in all."""
        self.enabled = True

    def add(self, layer: TTLinear) -> None:
        """Make ``layer`` the last of the siblings."""
        self._members.append(weakref.ref(layer))

    def code(self, layer: TTLinear, x: Tensor, left: Tensor) -> Tensor:
        """``x @ left.T`` for the left half of ``layer``; the codes of its siblings are made in the same product."""
        origin = _origin(x)
        if origin is not None and self._made_from is not None and _same(self._made_from, origin):
            code = self._waiting.pop(id(layer), None)
            if code is not None:
                self._made_from = self._made_from if self._waiting else None
                return code
        siblings = self._siblings(layer) if origin is not None else []
        if not siblings:
            return to_code(x, left)
        self.num_wasted += len(self._waiting)
        lefts = [left, *(sibling._halves(left.dtype)[0] for sibling in siblings)]
        codes = to_code(x, torch.cat(lefts)).split([half.shape[0] for half in lefts], dim=-1)
        self._waiting = {id(sibling): code for sibling, code in zip(siblings, codes[1:], strict=True)}
        self._made_from = origin
        self.num_joined += len(siblings)
        return codes[0]

    def reset(self) -> None:
        """Let go of waiting codes; stop joining if some were made in vain."""
        self.enabled = self.enabled and self.num_wasted + len(self._waiting) == 0
        self._waiting, self._made_from, self.num_wasted = {}, None, 0

    def _siblings(self, layer: TTLinear) -> list[TTLinear]:
        """The members after ``layer``, the first; none if ``layer`` is another or a member cannot join."""
        members = [member() for member in self._members]
        if not self.enabled or not members or members[0] is not layer:
            return []
        others = [member for member in members[1:] if member is not None]
        if len(others) < len(members) - 1 or any(one.in_features != layer.in_features for one in others):
            return []
        return others if all(can_keep(one.train_parameters()) for one in [layer, *others]) else []

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedProjections:
        memo[id(self)] = copied = JoinedProjections()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedProjections, ()


def _origin(x: Tensor) -> tuple[weakref.ref[Tensor], int, bool] | None:
    """What tells whether a code was made from ``x`` as it is now; None where that cannot be told."""
    if torch.compiler.is_compiling() or x.is_inference():
        return None
    return weakref.ref(x), x._version, torch.is_grad_enabled()


def _same(one: tuple[weakref.ref[Tensor], int, bool], other: tuple[weakref.ref[Tensor], int, bool]) -> bool:
    return one[0]() is other[0]() and one[1:] == other[1:]
