"""Halves of all TT linears of a model: built together in few operations, kept while nothing changes, never stale.

When the halves of a layer no longer hold, those of all members are built again with it: who the members are is fixed,
since how many are built together shows in the last bits, and a resumed run must not differ in any.

Halves hold while cores and gates are the same tensors in the same memory at the same version, and no optimizer has
made a step. Halves with a gradient hold past a backward pass only while gradients are being accumulated, that is while
``.grad`` is there.

What slips past torch's version counters, an edit through ``core.data``, is seen on a CPU by sampled entries; on other
devices ``layer.train()``, ``layer.eval()`` or a step of an optimizer make halves new.

A CUDA graph writes to parameters without torch's knowledge: after each replay call :func:`note_parameter_edit`, and
before and after each capture :func:`drop_kept_halves`: so a graph builds its own halves, and nobody else uses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_comera.ops.halves import Side, stacked_halves
from hf_comera.ops.precision import without_autocast

if TYPE_CHECKING:
    from hf_comera.modules.tt_linear import TTLinear

__all__ = ["HalvesBank", "can_share", "drop_kept_halves", "note_parameter_edit"]

T = TypeVar("T")

_PROBES = 4
"""Entries of a core that are compared to see edits which torch does not count."""

_num_steps = 0
"""Steps that optimizers of this process have made: some write to parameters behind torch's back."""
_banks: weakref.WeakSet[HalvesBank] = weakref.WeakSet()
"""All of this process."""


def note_parameter_edit(*_: Any) -> None:
    """Say that parameters may have changed behind torch's back: no halves made before this are used again."""
    global _num_steps
    _num_steps += 1


register_optimizer_step_post_hook(note_parameter_edit)


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
        entry = self._entries.get(layer)
        if entry is None or not entry.holds(layer.train_parameters(), dtype):
            with without_autocast(layer.core_0):
                entry = self._build(layer, dtype)
        return entry.left, entry.right

    def kept(self, layer: TTLinear, dtype: torch.dtype, label: str, build: Callable[[], T]) -> T:
        """What ``build`` makes of the cores of ``layer``, without a gradient; kept for as long as the halves hold."""
        self.halves(layer, dtype)
        entry = self._entries[layer]
        assert entry is not None
        if label not in entry.others:
            with without_autocast(layer.core_0):
                entry.others[label] = build()
        return entry.others[label]

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
        members = {} if layer in self._entries else {layer: dtype}
        for member, entry in list(self._entries.items()):
            tensors = member.train_parameters()
            member_dtype = dtype if entry is None or member is layer else entry.dtype
            if can_share(tensors) and not (entry is not None and entry.holds(tensors, member_dtype)):
                members[member] = member_dtype
        lefts, rights = _build_sides(members, on_left=True), _build_sides(members, on_left=False)
        for member, member_dtype in members.items():
            (left, left_side), (right, right_side) = lefts[member], rights[member]
            stamp = _Stamp.of(member.train_parameters())
            self._entries[member] = _Entry(left, right, member_dtype, (left_side, right_side), stamp)
        return self._entries[layer]

    def __deepcopy__(self, memo: dict[int, Any]) -> HalvesBank:
        memo[id(self)] = copied = HalvesBank()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return HalvesBank, ()


def can_share(tensors: list[Tensor]) -> bool:
    """Whether the halves of a layer with these cores and gates can be built with those of others, and kept.

    Not if a core is empty, sharded, a stand-in or traced by a transform, or is itself computed from something else;
    and not in compiled code, where the compiler sees plain products.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(
        type(tensor) in (torch.nn.Parameter, Tensor)
        and tensor.is_leaf
        and tensor.numel() > 0
        and not (tensor.is_meta or tensor.is_inference())
        for tensor in tensors
    )


@dataclass
class _Entry:
    """Halves of one layer, and until when they hold."""

    left: Tensor
    right: Tensor
    dtype: torch.dtype
    sides: tuple[Side, Side]
    stamp: _Stamp
    others: dict[str, Any] = field(default_factory=dict)

    def holds(self, tensors: list[Tensor], dtype: torch.dtype) -> bool:
        """Whether the halves can be used once more, for a layer with these cores and gates."""
        if self.dtype != dtype or not self.stamp.fits(tensors):
            return False
        if not torch.is_grad_enabled():
            return True
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        if trained and not (self.left.requires_grad or self.right.requires_grad):
            return False
        met_backward = any(side.has_met_backward for side in self.sides)
        return not met_backward or all(tensor.grad is not None for tensor in trained)


@dataclass
class _Stamp:
    """What a layer's cores and gates were when its halves were built."""

    tensors: list[Tensor]
    memory: list[Tensor]  # holds the memory, so that no other tensor can come to lie there
    state: list[tuple[int, int]]
    probes: list[_Probe]
    num_steps: int
    capturing: bool

    @classmethod
    def of(cls, tensors: list[Tensor]) -> _Stamp:
        """The stamp of ``tensors`` as they are."""
        memory = [tensor.detach() for tensor in tensors]
        state = [(tensor._version, tensor.data_ptr()) for tensor in tensors]
        return cls(tensors, memory, state, [_Probe(tensor) for tensor in memory], _num_steps, _capturing(tensors[0]))

    def fits(self, tensors: list[Tensor]) -> bool:
        """Whether nothing has changed."""
        if self.num_steps != _num_steps or self.capturing != _capturing(tensors[0]) or len(tensors) != len(self.state):
            return False
        for new, old, state in zip(tensors, self.tensors, self.state, strict=True):
            if new is not old or (new._version, new.data_ptr()) != state:
                return False
        return all(probe.sees_no_change() for probe in self.probes)


class _Probe:
    """A few entries of a tensor on a CPU, as bits, to compare; nothing elsewhere."""

    def __init__(self, tensor: Tensor) -> None:
        self.places: list[int] = []
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
            return
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        self.entries = tensor.view(-1).view(bits).numpy()  # reads single entries ten times as fast as a tensor
        self.places = [index * (tensor.numel() - 1) // (_PROBES - 1) for index in range(_PROBES)]
        self.values = self._read()

    def _read(self) -> list[int]:
        return [self.entries.item(place) for place in self.places]

    def sees_no_change(self) -> bool:
        """Whether the entries are what they were."""
        return not self.places or self._read() == self.values


def _capturing(core: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which halves must be built: a replay has to build them too."""
    return core.is_cuda and torch.cuda.is_current_stream_capturing()


def _build_sides(members: dict[TTLinear, torch.dtype], on_left: bool) -> dict[TTLinear, tuple[Tensor, Side]]:
    """The half on one side of each member, and the side that it was built with."""
    families: dict[tuple[Any, ...], list[TTLinear]] = {}
    for layer, dtype in members.items():
        families.setdefault(_family(layer, dtype, on_left), []).append(layer)
    found: dict[TTLinear, tuple[Tensor, Side]] = {}
    for layers in families.values():
        first = layers[0]
        side = Side(
            cores=[_of_side(layer, layer.cores(), on_left) for layer in layers],
            gates=[_of_side(layer, layer.rank_gates(), on_left) for layer in layers],
            on_left=on_left,
            features=first.in_features if on_left else first.out_features,
            dtype=members[first],
        )
        for layer, half in zip(layers, stacked_halves(side), strict=True):
            found[layer] = (half, side)
    return found


def _family(layer: TTLinear, dtype: torch.dtype, on_left: bool) -> tuple[Any, ...]:
    """Equal for layers whose halves on one side can be built together."""
    sizes = (layer.in_factors, layer.in_features) if on_left else (layer.out_factors, layer.out_features)
    core, trains = layer.core_0, any(tensor.requires_grad for tensor in layer.train_parameters())
    return sizes, dtype, core.dtype, core.device, trains, len(layer.rank_gates())


def _of_side(layer: TTLinear, tensors: list[Tensor], on_left: bool) -> list[Tensor]:
    num_in = len(layer.in_factors)
    return tensors[:num_in] if on_left else tensors[num_in:]
