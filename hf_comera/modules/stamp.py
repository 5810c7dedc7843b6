"""Stamps on cores and gates, which tell whether what was once made from them still holds.

A stamp fits while the tensors are the same objects in the same memory at the same version, and no optimizer has made a
step: some write to parameters behind torch's back. What slips past torch's version counters, an edit through
``core.data``, is seen on a CPU by sampled entries; on other devices ``layer.train()``, ``layer.eval()`` or a step of
an optimizer make everything new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Kept", "Stamp", "can_keep"]

T = TypeVar("T")

_PROBES = 4
"""Entries of a tensor that are compared to see edits which torch does not count."""

_num_steps = 0
"""Steps that optimizers of this process have made: some write to parameters behind torch's back."""


def _count_step(*_: Any) -> None:
    global _num_steps
    _num_steps += 1


register_optimizer_step_post_hook(_count_step)


def can_keep(tensors: list[Tensor]) -> bool:
    """Whether something made from these cores and gates can be kept, and made together with that of other layers.

    Not if one is empty, sharded, a stand-in or traced by a transform, or is itself computed from something else; and
    not in compiled code, where the compiler sees plain products.
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
class Stamp:
    """What tensors were when something was made from them."""

    tensors: list[Tensor]
    memory: list[Tensor]  # holds the memory, so that no other tensor can come to lie there
    state: list[tuple[int, int]]
    probes: list[_Probe]
    num_steps: int
    capturing: bool

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Stamp:
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
    """Whether a CUDA graph is being captured, in which things must be made: a replay has to make them too."""
    return core.is_cuda and torch.cuda.is_current_stream_capturing()


class Kept:
    """One thing made from tensors, without a gradient, and kept while their stamp fits; a copy starts with nothing."""

    def __init__(self) -> None:
        self._stamped: tuple[Stamp, Any] | None = None

    def get(self, tensors: list[Tensor], make: Callable[[], T]) -> T:
        """What ``make`` gives for ``tensors``."""
        if self._stamped is None or not self._stamped[0].fits(tensors):
            self._stamped = (Stamp.of(tensors), make())
        return self._stamped[1]

    def drop(self) -> None:
        """Let go of it."""
        self._stamped = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()
