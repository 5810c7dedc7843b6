"""Halves of all TT linears of a model: built together in few products, and used while they are valid.

Halves with a gradient are valid until their backward pass, halves without one until a core or gate changes. Each call
asks the cores themselves, so a layer may be called with its model, in a part of it, or alone.

A CUDA graph writes to parameters without torch's knowledge. Call :func:`note_parameter_edit` after each replay that
trains, and :func:`drop_cached_halves` before and after each capture, so that a graph builds halves of its own.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_comera.ops.halves import Side, model_halves
from hf_comera.ops.precision import chain_dtype, without_autocast
from hf_comera.ops.selective import outside_of_selection

if TYPE_CHECKING:
    from hf_comera.modules.tt_linear import TTLinear

__all__ = ["Cached", "HalvesCache", "can_cache", "core_copies", "drop_cached_halves", "note_parameter_edit"]

T = TypeVar("T")

# PyDLL: no other thread may write while bytes are compared
_memcmp = ctypes.PyDLL("msvcrt" if os.name == "nt" else None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)

_caches: weakref.WeakSet[HalvesCache] = weakref.WeakSet()
"""All of this process."""

_num_edits = 0
"""Steps of optimizers, and other edits that version counters may miss."""


def note_parameter_edit(*_: Any) -> None:
    """Make all halves and tables invalid: parameters may have changed without a change of their version."""
    global _num_edits
    _num_edits += 1


register_optimizer_step_post_hook(note_parameter_edit)


def drop_cached_halves() -> None:
    """Free the halves of all layers of this process, and with them what autograd holds for their gradients."""
    note_parameter_edit()
    for cache in list(_caches):
        cache.drop_all()


def can_cache(tensors: list[Tensor]) -> bool:
    """Whether something made from these cores and gates can be cached, and made together with that of other layers.

    Not if one is empty, sharded, a tensor subclass, traced by a transform, or itself computed from something else.
    Not in compiled code either, where the compiler sees plain products.
    """
    modes = torch._C._TorchDispatchModeKey
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch._C._get_dispatch_mode(modes.FAKE)
        or torch._C._get_dispatch_mode(modes.PROXY)
    ):
        return False
    with torch._C.DisableTorchFunction():  # no mode needs to see hundreds of questions a step
        return all(
            type(tensor) is torch.nn.Parameter
            and tensor.is_leaf
            and tensor.numel() > 0
            and not (tensor.is_meta or tensor.is_inference())
            for tensor in tensors
        )


class _Guard:
    """Tells whether cores and gates are still what they were when something was made from them.

    An edit that torch does not count, such as one through ``core.data``, is seen on a CPU only, where all bytes are
    compared: on another device the host would have to wait.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._state = _state(tensors)
        with torch._C.DisableTorchFunction():
            # alive, so that no other object and no other memory can take their place
            self._alive = tensors, [tensor.detach() for tensor in tensors]
            on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
            self._bytes = [(core.data_ptr(), ctypes.string_at(core.data_ptr(), _extent(core))) for core in on_cpu]

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether ``tensors`` are those, and nothing has changed."""
        if _state(tensors) != self._state:
            return False
        return all(_memcmp(address, values, len(values)) == 0 for address, values in self._bytes)


def _state(tensors: list[Tensor]) -> Any:
    """All that tells an edit without a look at values."""
    with torch._C.DisableTorchFunction():
        states = [(id(t), t._version, t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
    return _num_edits, _capturing(tensors[0]), states


def _extent(tensor: Tensor) -> int:
    """Bytes from its first entry to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize


def _capturing(core: Tensor) -> bool:
    """Whether a CUDA graph is being captured: it has to hold how things are made, since a replay makes them too."""
    return core.is_cuda and torch.cuda.is_current_stream_capturing()


class Cached:
    """One thing made from cores without a gradient, valid until one of them changes; a copy starts with nothing."""

    def __init__(self) -> None:
        self._made: tuple[_Guard, Any] | None = None

    def get(self, tensors: list[Tensor], make: Callable[[], T]) -> T:
        """The result of ``make`` for ``tensors``."""
        made = self._made  # another thread may drop it meanwhile
        if made is None or not made[0].holds(tensors):
            with outside_of_selection():
                self._made = made = (_Guard(tensors), make())
        return made[1]

    def drop(self) -> None:
        """Free it."""
        self._made = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Cached, ()


@dataclass
class _Halves:
    """Those of one layer."""

    left: Tensor
    right: Tensor
    dtype: torch.dtype
    guard: _Guard
    trained: list[bool]
    """Which cores and gates they have a gradient for."""
    dense: Tensor | None = None
    """Their product, where the layer takes the dense path and nothing trains."""

    def are_valid(self, tensors: list[Tensor], dtype: torch.dtype) -> bool:
        """Whether a layer with these cores and gates can use them."""
        if self.dtype != dtype or not self.guard.holds(tensors):
            return False
        if not torch.is_grad_enabled():
            return True
        if self.trained != [tensor.requires_grad for tensor in tensors] or self.left.is_inference():
            return False
        # what follows a backward pass may be an edit that nobody tells of
        return not any(getattr(half.grad_fn, "has_met_backward", False) for half in (self.left, self.right))


class HalvesCache:
    """Halves of its members; copied or pickled it is new, and the copies of its members join it.

    The members are fixed when a model is made. The number of halves that are built together shows in their last bits,
    and a run that was resumed must not differ in any.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakKeyDictionary[TTLinear, _Halves | None] = weakref.WeakKeyDictionary()
        _caches.add(self)

    def reset(self, layer: TTLinear) -> None:
        """Make ``layer`` a member without halves; those that it had are freed."""
        self._members[layer] = None

    def drop_all(self) -> None:
        """Free the halves of all members."""
        for layer in list(self._members):
            self.reset(layer)

    def halves(self, layer: TTLinear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``(left_RI, right_RO)`` of ``layer`` in ``dtype``, with a gradient where one is being recorded."""
        halves = self._valid_halves(layer, dtype)
        return halves.left, halves.right

    def dense_matrix(self, layer: TTLinear, dtype: torch.dtype) -> Tensor:
        """The product of the halves of ``layer``, ``(out, in)``, without a gradient; cached like them."""
        halves = self._valid_halves(layer, dtype)
        if halves.dense is None:
            with outside_of_selection(), without_autocast(layer.core_0):
                halves.dense = halves.right.T @ halves.left
        return halves.dense

    def _valid_halves(self, layer: TTLinear, dtype: torch.dtype) -> _Halves:
        """Those of ``layer``; where they are not valid, those of all members that are not are built."""
        halves = self._members.get(layer)
        if halves is not None and halves.are_valid(layer.tt_parameters(), dtype):
            return halves
        # in backward (checkpointing) autograd would send each piece of the gradient through all members
        is_alone = torch._C._current_graph_task_id() != -1
        with outside_of_selection(), without_autocast(layer.core_0):
            built = _build({layer: dtype} if is_alone else self._invalid(dtype) | {layer: dtype})
        self._members.update(built)
        return built[layer]

    def _invalid(self, dtype: torch.dtype) -> dict[TTLinear, torch.dtype]:
        """Members without valid halves, and the dtype to build them in: ``dtype`` where there were none."""
        found = {}
        for layer, halves in list(self._members.items()):
            tensors, own_dtype = layer.tt_parameters(), dtype if halves is None else halves.dtype
            if can_cache(tensors) and (halves is None or not halves.are_valid(tensors, own_dtype)):
                found[layer] = own_dtype
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return HalvesCache, ()


def core_copies(layers: Iterable[TTLinear]) -> int:
    """Bytes of the copies that halves of ``layers``, built together, keep of cores for their own backward."""
    sides = [side for _, side in _sides({layer: layer.core_0.dtype for layer in layers})]
    return sum(side.num_stacked * chain_dtype(side.cores[0][0]).itemsize for side in sides)


def _build(layers: dict[TTLinear, torch.dtype]) -> dict[TTLinear, _Halves]:
    """The halves of each layer, in the dtype that it comes with."""
    parameters = {layer: layer.tt_parameters() for layer in layers}
    guards = {layer: _Guard(tensors) for layer, tensors in parameters.items()}  # before: another thread may edit
    groups = _sides(layers)
    halves: dict[TTLinear, list[Tensor]] = {layer: [] for layer in layers}
    for (group, _), built in zip(groups, model_halves([side for _, side in groups]), strict=True):
        for layer, half in zip(group, built, strict=True):
            halves[layer].append(half)
    records = torch.is_grad_enabled()
    trained = {layer: [records and t.requires_grad for t in tensors] for layer, tensors in parameters.items()}
    return {
        layer: _Halves(halves[layer][0], halves[layer][1], dtype=dtype, guard=guards[layer], trained=trained[layer])
        for layer, dtype in layers.items()
    }


def _sides(layers: dict[TTLinear, torch.dtype]) -> list[tuple[list[TTLinear], Side]]:
    """Layers whose halves on one side can be built together, and that side of them; left sides come first."""
    groups: dict[Any, tuple[list[TTLinear], Side]] = {}
    for on_left in (True, False):
        for layer, dtype in layers.items():
            num_in, core, gates = len(layer.in_factors), layer.core_0, layer.rank_gates()
            if on_left:
                part, factors, features = slice(num_in), layer.in_factors, layer.in_features
            else:
                part, factors, features = slice(num_in, None), layer.out_factors, layer.out_features
            trains = any(tensor.requires_grad for tensor in layer.tt_parameters())
            key = on_left, factors, features, dtype, core.dtype, core.device, trains, len(gates)
            members, side = groups.setdefault(key, ([], Side([], [], on_left, features, dtype)))
            members.append(layer)
            side.cores.append(layer.cores()[part])
            side.gates.append(gates[part])
    return list(groups.values())
