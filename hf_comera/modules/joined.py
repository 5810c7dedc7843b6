"""Sibling layers that read the same input, as query, key and value do, share one product into their rank spaces."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_comera.modules.stamp import can_keep
from hf_comera.ops.halves import padded_rank
from hf_comera.ops.tt_linear import to_code

if TYPE_CHECKING:
    from hf_comera.modules.tt_linear import TTLinear

__all__ = ["CachedTokens", "JoinedProjections"]

WORTH_A_CACHE = 1 << 20
"""Entries of keys from which on a cache of codes was faster on a CPU; below, stand-ins for each token cost more."""

_Origin = tuple["weakref.ref[Tensor]", tuple[Any, ...]]


class CachedTokens:
    """Shared by the codes that wait in caches; its life tells whether any still do."""


class JoinedProjections:
    """Siblings in the order in which a model calls them; the first to be called makes the codes of all.

    A code waits until its layer is called with the very tensor that it was made from, and while that layer's left half
    is the one that it was made with. A layer that gets another tensor makes its own code. A copied or pickled group is
    new; the copies of its members join it again.
    """

    def __init__(self) -> None:
        self._members: dict[int, weakref.ref[TTLinear]] = {}
        # one object, replaced as a whole, since threads share it
        self._pending: tuple[_Origin, dict[int, tuple[Tensor, Tensor]]] | None = None
        self.num_wasted = 0
        """Codes that were made and never asked for, since the training mode was last set."""
        self.num_joined = 0
        """Codes that were made with that of a sibling, in all."""
        self.enabled = True
        self.attention: Any = None
        """The config of the model's attention, if it takes all three codes, and takes them as they are; else None."""
        self.num_parts = 1
        """How many of query, key and value each member gives, side by side."""
        self.has_cache = False
        """Whether keys and values of that attention wait in a cache for the tokens that follow."""
        self._cache: Callable[[], CachedTokens | None] = lambda: None

    @property
    def num_waiting(self) -> int:
        """Codes that have been made and not yet asked for."""
        pending = self._pending
        return 0 if pending is None else len(pending[1])

    @property
    def num_members(self) -> int:
        """Siblings, the first included."""
        return len(self._members)

    def add(self, layer: TTLinear, place: int) -> None:
        """Make ``layer`` the sibling at ``place``, unless there is one."""
        present = self._members.get(place)
        if present is None or present() is None:
            self._members[place] = weakref.ref(layer)

    def code(self, layer: TTLinear, x: Tensor, left: Tensor) -> Tensor:
        """``x @ left.T`` for the left half of ``layer``; the codes of its siblings are made in the same product."""
        origin, pending = _origin(x), self._pending
        if origin is not None and pending is not None and _same(pending[0], origin):
            code, half = pending[1].pop(id(layer), (None, None))
            if not pending[1]:
                self._pending = None
            if code is not None and half is left:
                return code
        siblings = self._siblings(layer, x) if origin is not None else []
        if origin is None or not siblings:
            return to_code(x, left)
        self.num_wasted += self.num_waiting
        lefts = [left, *(sibling._halves(left.dtype)[0] for sibling in siblings)]
        joint = to_code(x, torch.cat(lefts))
        if joint.requires_grad:  # a code that has met backward cannot be used any more
            joint.register_hook(partial(self._forget, origin[0]))
        codes = joint.split([half.shape[0] for half in lefts], dim=-1)
        waiting = zip(siblings, codes[1:], lefts[1:], strict=True)
        self._pending = (origin, {id(sibling): (code, half) for sibling, code, half in waiting})
        self.num_joined += len(siblings)
        return codes[0]

    @property
    def num_code_heads(self) -> int | None:
        """Heads that the output of a member has in attention that takes its code instead; None if it takes none."""
        return None if self.code_refusal() else self._heads()

    def code_refusal(self) -> str | None:
        """Why attention takes the outputs of the members and not their codes; None if it takes codes."""
        if self.attention is None:
            return "it is not of a class that is known to take query, key and value as they are"
        if self.attention._attn_implementation != "sdpa":
            return f"its implementation is {self.attention._attn_implementation!r}: set_attn_implementation('sdpa')"
        members = [member() for member in self._members.values()]
        for member in members:
            if member is None:
                return "a layer is gone"
            if member._forward_hooks:
                return "a hook watches the output of a layer"
            if member.prefers_dense:
                return "its ranks are so high that a layer is multiplied as a dense matrix"
            size, left_over = divmod(member.out_features, self._heads())
            needed = padded_rank(member.middle_rank + (member.bias is not None))
            if left_over or needed > size:
                return f"a code with its bias has {needed} numbers and a head {size}: the rank would have to be lower"
        return None

    def cache_for(self, rows: int, features: int) -> CachedTokens | None:
        """What codes of ``rows`` rows, for outputs of ``features``, are to share if a cache begins with them."""
        if not self.has_cache or torch.is_grad_enabled() or rows * features // self.num_parts < WORTH_A_CACHE:
            return None
        cache = self._cache() or CachedTokens()  # of all caches at a time, for a prompt may come in pieces
        self._cache = weakref.ref(cache)
        return cache

    def cached_numbers(self) -> tuple[int, int]:
        """Numbers that a token takes in a cache of codes, and in one of tensors; a query takes none."""
        members = [member for place in sorted(self._members) if (member := self._members[place]()) is not None]
        keys_and_values = members[-1:] if self.num_parts > 1 else members[1:]
        codes = sum(padded_rank(member.middle_rank + (member.bias is not None)) for member in keys_and_values)
        return codes, 2 * members[0].out_features // self.num_parts

    @property
    def is_cached(self) -> bool:
        """Whether codes wait in a cache, so that those of tokens that follow are wanted too."""
        return self._cache() is not None and not torch.is_grad_enabled()

    def _heads(self) -> int:
        return int(self.attention.num_attention_heads) * self.num_parts

    def reset(self) -> None:
        """Let go of waiting codes; stop joining if some were made in vain."""
        self.enabled = self.enabled and self.num_wasted + self.num_waiting == 0
        self._pending, self.num_wasted = None, 0

    def _forget(self, x: weakref.ref[Tensor], grad: Tensor) -> None:
        if self._pending is not None and self._pending[0][0] is x:
            self.num_wasted += self.num_waiting
            self._pending = None

    def _siblings(self, layer: TTLinear, x: Tensor) -> list[TTLinear]:
        """The members after ``layer`` that need a code of ``x``; none if it is not the first, or one cannot join."""
        members = [self._members[place]() for place in sorted(self._members)]
        if not self.enabled or None in members:
            return []
        needing_codes = (one for one in members if one is not None and not (one.is_removed or one.prefers_dense))
        joining = list(needing_codes)
        if not joining or joining[0] is not layer:
            return []
        can_join = (one.in_features == layer.in_features and can_keep(one.train_parameters()) for one in joining)
        return joining[1:] if all(can_join) else []

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedProjections:
        memo[id(self)] = copied = JoinedProjections()
        copied.attention, copied.num_parts = copy.deepcopy(self.attention, memo), self.num_parts
        copied.has_cache = self.has_cache
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            JoinedProjections,
            (),
            {
                "attention": self.attention,
                "num_parts": self.num_parts,
                "has_cache": self.has_cache,
            },
        )


def _origin(x: Tensor) -> _Origin | None:
    """What tells whether a code was made from ``x`` as it is now, and in the same region of checkpointing."""
    if torch.compiler.is_compiling() or x.is_inference():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return weakref.ref(x), (x._version, torch.is_grad_enabled(), hooks)


def _same(one: _Origin, other: _Origin) -> bool:
    return one[0]() is other[0]() and one[1] == other[1]
