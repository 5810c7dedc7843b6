"""Where backward gets a tensor from: kept as it was, stored in fewer bits, made again by its call, or run again.

Autograd holds a :class:`Saved` for each tensor it wants; that holds a source, and the source what it needs. A source
that makes its tensor again holds on to it until nobody is left who may ask, or backward is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_comera.memory.lineage import Call, Place
from hf_comera.memory.random_draws import RandomDraws

__all__ = ["Kept", "Packed", "Rebuilt", "Rerun", "RerunOutput", "Saved", "Source"]


class Source(Protocol):
    """The entries of one storage."""

    depth: int
    """Length of the longest chain of rebuilt tensors that this one ends."""
    memory: list[Any]
    """What lies in memory for it: tensors, and other sources."""
    __weakref__: Any

    def at(self, place: Place) -> Tensor:
        """The tensor at ``place`` of the storage, without a gradient."""


class Saved:
    """What autograd holds in place of a tensor."""

    __slots__ = ("place", "source")

    def __init__(self, source: Source | None, place: Place) -> None:
        self.source, self.place = source, place

    def tensor(self) -> Tensor:
        """The tensor, for backward."""
        assert self.source is not None
        return self.source.at(self.place)


class Kept:
    """A tensor as it is.

    Raises:
        RuntimeError: From :meth:`at`, if it was changed in place since.
    """

    depth = 0

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version
        self.memory: list[Any] = [self.alias]

    def at(self, place: Place) -> Tensor:
        """See :class:`Source`."""
        if self.alias._version != self.version:
            raise RuntimeError(
                f"A tensor of shape {tuple(self.alias.shape)} that is needed for backward was changed in place: it is "
                f"at version {self.alias._version}, expected version {self.version}. Change a copy of it instead."
            )
        alias = self.alias if self.alias.dtype == place.dtype else self.alias.view(place.dtype)
        if place == Place.of(alias):
            return alias.detach()
        return alias.as_strided(place.size, place.stride, place.offset)


class _Made:
    """A source that makes its tensor when it is asked, and keeps it for the next who asks."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.shared = False
        """Whether others than one call may ask, so that it is worth keeping."""
        self.made: Tensor | None = None

    def make(self) -> Tensor:
        """The tensor at ``self.place``."""
        raise NotImplementedError

    def at(self, place: Place) -> Tensor:
        """See :class:`Source`."""
        made = self.made
        if made is None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                made = _laid_out(self.make(), self.place)
            if self.shared:
                self.made = made
                _forget_after_backward(self)
        if place == self.place:
            return made.detach()
        return made.as_strided(place.size, place.stride, place.offset - self.place.offset + made.storage_offset())


class Packed(_Made):
    """A tensor in fewer bits."""

    depth = 0

    def __init__(self, stored: Any, place: Place) -> None:
        super().__init__(place)
        self.stored = stored
        self.shared = True
        self.memory: list[Any] = [stored]

    def make(self) -> Tensor:
        """Decode it."""
        decoded: Tensor = self.stored.decode()
        return decoded


class Rebuilt(_Made):
    """A tensor that its call makes again from other sources."""

    def __init__(self, call: Call, sources: Sequence[Source], place: Place) -> None:
        super().__init__(place)
        self.call = call
        self.parents = [(source, parent[1]) for source, parent in zip(sources, call.parents, strict=True)]
        self.memory: list[Any] = list(sources)
        self.depth = max((source.depth for source in sources), default=0) + 1

    def make(self) -> Tensor:
        """Make the call."""
        made: Tensor = self.call([source.at(place) for source, place in self.parents])
        return made


class Rerun:
    """All that one call saved inside, and what it gave, by running it again; with the random numbers it drew."""

    def __init__(
        self, call: Call, sources: Sequence[Source], need_grad: Sequence[bool], draws: RandomDraws | None
    ) -> None:
        self.call, self.need_grad, self.draws = call, need_grad, draws
        self.parents = [(source, parent[1]) for source, parent in zip(sources, call.parents, strict=True)]
        self.memory: list[Any] = [*sources, *([] if draws is None else draws.memory)]
        self.depth = max((source.depth for source in sources), default=0) + 1
        self.made: list[Tensor] | None = None

    def results(self) -> list[Tensor]:
        """What was saved, in order, and last the output."""
        if self.made is None:
            tensors = [source.at(place) for source, place in self.parents]
            for tensor, needs_grad in zip(tensors, self.need_grad, strict=True):
                tensor.requires_grad_(needs_grad)
            saved: list[Tensor] = []
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), _unused)
            same = nullcontext() if self.draws is None else self.draws.repeated()
            with torch._C.DisableTorchFunction(), torch.enable_grad(), hooks, same:
                output = self.call(tensors)
            self.made = [*saved, output.detach()]
            _forget_after_backward(self)
        return self.made


class RerunOutput(_Made):
    """One of the tensors of a :class:`Rerun`."""

    def __init__(self, rerun: Rerun, index: int, place: Place) -> None:
        super().__init__(place)
        self.rerun, self.index, self.depth = rerun, index, rerun.depth
        self.memory: list[Any] = [rerun]

    def make(self) -> Tensor:
        """Run the call, unless another has asked before."""
        return self.rerun.results()[self.index]


def _unused(_: Any) -> Tensor:
    raise RuntimeError("The graph of a call that was run again has no backward.")


def _laid_out(tensor: Tensor, place: Place) -> Tensor:
    """``tensor`` with the strides of ``place``."""
    if tensor.stride() == place.stride or tensor.numel() < 2:
        return tensor
    return tensor.new_empty_strided(place.size, place.stride).copy_(tensor)


_made_in: dict[int, weakref.WeakSet[_Made | Rerun]] = {}
"""Sources that hold a tensor until a backward, given by its number, is over."""


def _forget_after_backward(source: _Made | Rerun) -> None:
    """Let go of what ``source`` has made when backward is over: a graph that is retained may live on."""
    task = torch._C._current_graph_task_id()
    if task == -1:
        return
    if task not in _made_in:
        _made_in.clear()  # of a backward that raised
        _made_in[task] = weakref.WeakSet()
        torch.autograd.Variable._execution_engine.queue_callback(partial(_forget, task))
    _made_in[task].add(source)


def _forget(task: int) -> None:
    for source in list(_made_in.pop(task, ())):
        source.made = None
