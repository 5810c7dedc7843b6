"""How the tensors of a forward pass came about: for each storage the call that filled it, and what it was given.

Nothing here holds a tensor but parameters: a storage that nobody else needs is freed as ever, and its entry with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from hf_comera.memory.sources import Rerun, Source

__all__ = ["Call", "Input", "Lineage", "Node", "Place", "is_plain"]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is all that lies at its place of its storage, and tells when it is written to.

    Stand-ins of any sort are not; nor are sparse, nested and conjugated tensors, those that a transform of
    ``torch.func`` follows, and those made in inference mode.
    """
    if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class Place(NamedTuple):
    """Where in a storage a tensor lies."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """That of ``tensor``."""
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)


class Input(NamedTuple):
    """Stands for a tensor among the arguments of a call."""

    index: int


@dataclass(eq=False)
class Call:
    """A call of torch whose tensors are replaced by :class:`Input`, so that it can be made again with others."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: str
    parents: list[tuple[Node, Place]]
    autocast: tuple[str, torch.dtype | None] | None
    """Device type, where it has autocast, and the dtype if that was on."""
    rerun: weakref.ref[Rerun] | None = None
    """What makes the call again with all that autograd saves inside it, if something needs that."""

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Make the call again with ``tensors`` for its parents."""
        args, kwargs = _fill(self.args, tensors), _fill(self.kwargs, tensors)
        if self.autocast is None:
            return self.func(*args, **kwargs)
        device_type, dtype = self.autocast
        with torch.autocast(device_type, dtype, enabled=dtype is not None):
            return self.func(*args, **kwargs)


def _fill(template: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(template, Input):
        return tensors[template.index]
    if type(template) in (list, tuple):
        return type(template)(_fill(item, tensors) for item in template)
    if type(template) is dict:
        return {name: _fill(item, tensors) for name, item in template.items()}
    return template


@dataclass(eq=False)
class Node:
    """One storage at one version of its entries."""

    version: int
    place: Place
    tensor: weakref.ref[Tensor]
    """A tensor on the storage, as long as Python has one."""
    parameter: Tensor | None = None
    call: Call | None = None
    """How it is made; None if that is not known or would cost too much."""
    is_weight: bool = False
    """Whether a product takes it as its weight."""
    source: weakref.ref[Source] | None = None
    """Where backward gets it from, once something has asked."""

    def find_source(self) -> Source | None:
        """The source, as long as something needs it."""
        return None if self.source is None else self.source()


class Lineage:
    """The nodes of a forward pass, by storage."""

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[Node, StorageWeakRef]] = {}
        self._sweep_at = 1024

    def find(self, tensor: Tensor) -> Node | None:
        """The node of a tensor's storage, if it has one and has not been written to since."""
        # the weak reference keeps the address of a storage that is gone from being used again
        found = self._nodes.get(tensor.untyped_storage()._cdata)
        return found[0] if found is not None and found[0].version == tensor._version else None

    def node(self, tensor: Tensor) -> Node:
        """The node of a tensor's storage; a new one, made in an unknown way, if there is none."""
        return self.find(tensor) or self.add(tensor, None)

    def add(self, tensor: Tensor, call: Call | None) -> Node:
        """Write down that ``call`` has filled the storage of ``tensor``."""
        storage = StorageWeakRef(tensor.untyped_storage())
        base = tensor if tensor._base is None else tensor._base
        parameter = base.detach() if type(base) is torch.nn.Parameter else None
        node = Node(tensor._version, Place.of(tensor), weakref.ref(tensor), parameter, call)
        self._nodes[storage.cdata] = (node, storage)
        if len(self._nodes) > self._sweep_at:
            self._nodes = {key: entry for key, entry in self._nodes.items() if not entry[1].expired()}
            self._sweep_at = 1024 + 2 * len(self._nodes)
        return node

    def clear(self) -> None:
        """Forget all, and let calls that live on in recipes go of what came before."""
        for node, _ in self._nodes.values():
            if node.call is not None:
                node.call.parents = []
        self._nodes = {}
