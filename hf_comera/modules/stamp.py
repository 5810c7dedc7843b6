"""Stamps on cores and gates, which tell whether what was once made from them still holds.

A stamp fits while the tensors are the same objects in the same memory and shape at the same version, and no optimizer
has made a step: some write to parameters behind torch's back. What slips past torch's version counters, an edit
through ``core.data``, is seen on a CPU, where all bytes are compared; on other devices ``layer.train()``,
``layer.eval()`` or a step of an optimizer make everything new.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_comera.ops.selective import outside_of_selection

__all__ = ["Kept", "Stamp", "can_keep", "note_parameter_edit"]

T = TypeVar("T")
_State = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]

# PyDLL: no other thread may run between the question where a tensor lies and the look at what lies there
_memcmp = ctypes.PyDLL("msvcrt" if os.name == "nt" else None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)

_num_steps = 0
"""Steps that optimizers of this process have made: some write to parameters behind torch's back."""


def note_parameter_edit(*_: Any) -> None:
    """Say that parameters may have changed behind torch's back: nothing made before this holds any more."""
    global _num_steps
    _num_steps += 1


register_optimizer_step_post_hook(note_parameter_edit)


def can_keep(tensors: list[Tensor]) -> bool:
    """Whether something made from these cores and gates can be kept, and made together with that of other layers.

    Not if one is empty, sharded, a tensor subclass or traced by a transform, or is itself computed from something
    else; and not in compiled code, where the compiler sees plain products.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or _is_traced():
        return False
    with torch._C.DisableTorchFunction():  # no mode needs to see hundreds of questions a step
        return all(
            type(tensor) is torch.nn.Parameter
            and tensor.is_leaf
            and tensor.numel() > 0
            and not (tensor.is_meta or tensor.is_inference())
            for tensor in tensors
        )


@dataclass
class Stamp:
    """What tensors were when something was made from them."""

    tensors: list[Tensor]
    memory: list[Tensor]  # holds the memory, so that no other tensor can come to lie there
    states: list[_State]
    snapshots: list[_Snapshot]
    num_steps: int
    capturing: bool

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Stamp:
        """The stamp of ``tensors`` as they are."""
        with torch._C.DisableTorchFunction():
            memory = [tensor.detach() for tensor in tensors]
            states = [_state(tensor) for tensor in tensors]
            snapshots = [_Snapshot(tensor) for tensor in memory if tensor.device.type == "cpu"]
            return cls(tensors, memory, states, snapshots, _num_steps, _capturing(tensors[0]))

    @property
    def sees_every_edit(self) -> bool:
        """Whether edits that torch does not count are seen: all tensors are on a CPU."""
        return len(self.snapshots) == len(self.tensors)

    def fits(self, tensors: list[Tensor]) -> bool:
        """Whether nothing has changed."""
        if (
            self.num_steps != _num_steps
            or self.capturing != _capturing(tensors[0])
            or len(tensors) != len(self.states)
        ):
            return False
        with torch._C.DisableTorchFunction():
            for new, old, state in zip(tensors, self.tensors, self.states, strict=True):
                if new is not old or _state(new) != state:
                    return False
        return all(snapshot.sees_no_change() for snapshot in self.snapshots)


def _state(tensor: Tensor) -> _State:
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _Snapshot:
    """The bytes of a tensor on a CPU as they were.

    They are compared with what lies there now, once the state says that the tensor still does: cores are small, so
    this takes no longer than asking torch for a single entry of each, and no operation of torch's is counted.
    """

    def __init__(self, tensor: Tensor) -> None:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        entries = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        self.address, self.num_bytes = tensor.data_ptr(), entries * tensor.itemsize
        self.values = ctypes.string_at(self.address, self.num_bytes)

    def sees_no_change(self) -> bool:
        """Whether the bytes are what they were."""
        return _memcmp(self.address, self.values, self.num_bytes) == 0


def _is_traced() -> bool:
    """Whether what is computed now is recorded for another time, or on tensors without values."""
    modes = torch._C._TorchDispatchModeKey
    return bool(
        torch._C._get_tracing_state()
        or torch._C._get_dispatch_mode(modes.FAKE)
        or torch._C._get_dispatch_mode(modes.PROXY)
    )


def _capturing(core: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which things must be made: a replay has to make them too."""
    return core.is_cuda and torch.cuda.is_current_stream_capturing()


class Kept:
    """One thing made from tensors, without a gradient, and kept while their stamp fits; a copy starts with nothing."""

    def __init__(self) -> None:
        self._stamped: tuple[Stamp, Any] | None = None

    def get(self, tensors: list[Tensor], make: Callable[[], T]) -> T:
        """What ``make`` gives for ``tensors``."""
        stamped = self._stamped  # another thread may drop it meanwhile
        if stamped is None or not stamped[0].fits(tensors):
            with outside_of_selection():
                self._stamped = stamped = (Stamp.of(tensors), make())
        return stamped[1]

    def drop(self) -> None:
        """Let go of it."""
        self._stamped = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()
