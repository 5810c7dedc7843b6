"""Halves of all TT linears of a model: built together in few operations, kept while nothing changes, never stale.

When the halves of a layer no longer hold, those of all members are built again with it: who the members are is fixed,
since how many are built together shows in the last bits, and a resumed run must not differ in any.

Halves hold while the cores and gates bear the same stamp (``modules/stamp.py``). Halves with a gradient hold past a
backward pass only on a CPU, and only while gradients are being accumulated, that is while ``.grad`` is there.

A CUDA graph writes to parameters without torch's knowledge: after each replay call ``note_parameter_edit`` of
``modules/stamp.py``, and before and after each capture :func:`drop_kept_halves`: so a graph builds its own halves, and
nobody else uses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_comera.modules.stamp import Stamp, can_keep, note_parameter_edit
from hf_comera.ops.halves import Side, model_halves
from hf_comera.ops.precision import chain_dtype, without_autocast
from hf_comera.ops.selective import outside_of_selection

if TYPE_CHECKING:
    from hf_comera.modules.tt_linear import TTLinear

__all__ = ["HalvesBank", "core_copies", "drop_kept_halves"]

_banks: weakref.WeakSet[HalvesBank] = weakref.WeakSet()
"""All of this process."""


def drop_kept_halves() -> None:
    """Free the halves of all layers of this process, and with them what autograd holds for their gradients."""
    note_parameter_edit()
    for bank in list(_banks):
        bank.drop_all()


class HalvesBank:
    """Halves of its members; a copied or pickled bank is new, and the copies of its members join it again."""

    def __init__(self) -> None:
        self._entries: weakref.WeakKeyDictionary[TTLinear, _Entry | None] = weakref.WeakKeyDictionary()
        _banks.add(self)

    def add(self, layer: TTLinear) -> None:
        """Make ``layer`` a member."""
        self._entries[layer] = None

    def halves(self, layer: TTLinear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``(left_RI, right_RO)`` of ``layer`` in ``dtype``, with a gradient where one is being recorded."""
        entry = self._entry(layer, dtype)
        return entry.left, entry.right

    def dense_matrix(self, layer: TTLinear, dtype: torch.dtype) -> Tensor:
        """What the halves of ``layer`` multiply to, ``(out, in)``, without a gradient; kept like them."""
        entry = self._entry(layer, dtype)
        if entry.dense is None:
            with outside_of_selection(), without_autocast(layer.core_0):
                entry.dense = entry.right.T @ entry.left
        return entry.dense

    def _entry(self, layer: TTLinear, dtype: torch.dtype) -> _Entry:
        """That of ``layer``, which holds."""
        entry = self._entries.get(layer)
        if entry is not None and entry.holds(layer.tt_parameters(), dtype):
            return entry
        with outside_of_selection(), without_autocast(layer.core_0):
            return self._build(layer, dtype)

    def drop(self, layer: TTLinear) -> None:
        """Free the halves of ``layer``, which stays a member."""
        if layer in self._entries:
            self._entries[layer] = None

    def drop_all(self) -> None:
        """Free the halves of all members."""
        for layer in list(self._entries):
            self._entries[layer] = None

    def _build(self, layer: TTLinear, dtype: torch.dtype) -> _Entry:
        """Build the halves of ``layer``, and with them those of all members that no longer hold."""
        # in backward (checkpointing) autograd would send each piece of the gradient through all members
        alone = layer not in self._entries or torch._C._current_graph_task_id() != -1
        members = {layer: dtype} if alone else {}
        for member, entry in [] if alone else list(self._entries.items()):
            tensors = member.tt_parameters()
            member_dtype = dtype if entry is None or member is layer else entry.dtype
            if can_keep(tensors) and not (entry is not None and entry.holds(tensors, member_dtype)):
                members[member] = member_dtype
        found, built = _build_halves(members), {}
        for member, member_dtype in members.items():
            (left, left_side), (right, right_side) = found[member]
            tensors = member.tt_parameters()
            trained = tuple(tensor.requires_grad for tensor in tensors) if torch.is_grad_enabled() else None
            stamp = Stamp.of(tensors)
            built[member] = _Entry(left, right, member_dtype, (left_side, right_side), stamp, trained)
        self._entries.update(built)
        return built[layer]

    def __deepcopy__(self, memo: dict[int, Any]) -> HalvesBank:
        memo[id(self)] = copied = HalvesBank()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return HalvesBank, ()


@dataclass
class _Entry:
    """Halves of one layer, and until when they hold."""

    left: Tensor
    right: Tensor
    dtype: torch.dtype
    sides: tuple[Side, Side]
    stamp: Stamp
    trained: tuple[bool, ...] | None
    """Which cores and gates the halves have a gradient for; None if they were built without."""
    dense: Tensor | None = None
    """The dense matrix, where the layer takes it and nothing trains."""

    def holds(self, tensors: list[Tensor], dtype: torch.dtype) -> bool:
        """Whether the halves can be used once more, for a layer with these cores and gates."""
        if self.dtype != dtype or not self.stamp.fits(tensors):
            return False
        if not torch.is_grad_enabled():
            return True
        if self.trained != tuple(tensor.requires_grad for tensor in tensors):
            return self.trained is None and not any(t.requires_grad for t in tensors) and not self.left.is_inference()
        if not any(side.has_met_backward for side in self.sides):
            return True
        return self.stamp.sees_every_edit and all(
            tensor.grad is not None for tensor in tensors if tensor.requires_grad
        )


def core_copies(layers: Iterable[TTLinear]) -> int:
    """Bytes of the copies that halves of ``layers``, built together, keep of cores for their own backward."""
    members = {layer: layer.core_0.dtype for layer in layers}
    sides = [side for on_left in (True, False) for _, side in _families(members, on_left)]
    return sum(side.num_stacked * chain_dtype(side.cores[0][0]).itemsize for side in sides)


def _build_halves(members: dict[TTLinear, torch.dtype]) -> dict[TTLinear, list[tuple[Tensor, Side]]]:
    """The left and the right half of each member, and the side that each was built with."""
    families = [family for on_left in (True, False) for family in _families(members, on_left)]
    found: dict[TTLinear, list[tuple[Tensor, Side]]] = {member: [] for member in members}
    for (layers, side), halves in zip(families, model_halves([side for _, side in families]), strict=True):
        for layer, half in zip(layers, halves, strict=True):
            found[layer].append((half, side))
    return found


def _families(members: dict[TTLinear, torch.dtype], on_left: bool) -> Iterator[tuple[list[TTLinear], Side]]:
    """Members whose halves on one side can be built together, and that side of them."""
    families: dict[tuple[Any, ...], list[TTLinear]] = {}
    for layer, dtype in members.items():
        families.setdefault(_family(layer, dtype, on_left), []).append(layer)
    for layers in families.values():
        first = layers[0]
        yield (
            layers,
            Side(
                cores=[_of_side(layer, layer.cores(), on_left) for layer in layers],
                gates=[_of_side(layer, layer.rank_gates(), on_left) for layer in layers],
                on_left=on_left,
                features=first.in_features if on_left else first.out_features,
                dtype=members[first],
            ),
        )


def _family(layer: TTLinear, dtype: torch.dtype, on_left: bool) -> tuple[Any, ...]:
    """Equal for layers whose halves on one side can be built together."""
    sizes = (layer.in_factors, layer.in_features) if on_left else (layer.out_factors, layer.out_features)
    core, trains = layer.core_0, any(tensor.requires_grad for tensor in layer.tt_parameters())
    return sizes, dtype, core.dtype, core.device, trains, len(layer.rank_gates())


def _of_side(layer: TTLinear, tensors: list[Tensor], on_left: bool) -> list[Tensor]:
    num_in = len(layer.in_factors)
    return tensors[:num_in] if on_left else tensors[num_in:]
