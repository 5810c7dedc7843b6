"""Where backward gets a tensor from: kept as it was, stored in fewer bits, made again by its call, or run again.

Autograd holds a :class:`Saved` for each tensor it wants; that holds a source, and the source what it needs. A source
that makes its tensor again holds on to it until nobody is left who may ask, or backward is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel

from hf_comera.memory.lineage import Call, Place, is_plain
from hf_comera.memory.random_draws import RandomDraws

__all__ = ["Kept", "Packed", "Rebuilt", "Rerun", "RerunOutput", "Saved", "Source", "Whole"]


class Source(Protocol):
    """The entries of one storage."""

    depth: int
    """Length of the longest chain of rebuilt tensors that this one ends."""
    memory: list[Any]
    """What lies in memory for it: tensors, and other sources."""
    __weakref__: Any

    def at(self, place: Any) -> Tensor:
        """The tensor at ``place`` of the storage, without a gradient."""


class Saved:
    """What autograd holds in place of a tensor."""

    __slots__ = ("place", "source")

    def __init__(self, source: Source | None, place: Place | None) -> None:
        self.source, self.place = source, place

    def tensor(self) -> Tensor:
        """The tensor, for backward."""
        assert self.source is not None
        return self.source.at(self.place)


class Kept:
    """A tensor as it is.

    Raises:
        RuntimeError: From :meth:`at`, if it was changed in place or freed since.
    """

    depth = 0

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version
        self.memory: list[Any] = [self.alias]
        self._num_bytes = tensor.untyped_storage().nbytes() if is_plain(tensor) else 0

    def at(self, place: Place) -> Tensor:
        """See :class:`Source`."""
        self.check()
        if place == Place.of(self.alias):
            return self.alias.detach()
        return _on_storage_of(self.alias, place, place.offset)

    def check(self) -> None:
        """Refuse a tensor that is not what it was."""
        if self.alias._version != self.version:
            raise RuntimeError(
                f"A tensor of shape {tuple(self.alias.shape)} that is needed for backward was changed in place: it is "
                f"at version {self.alias._version}, expected version {self.version}. Change a copy of it instead."
            )
        if self._num_bytes and self.alias.untyped_storage().nbytes() < self._num_bytes:
            raise RuntimeError(
                f"A tensor of shape {tuple(self.alias.shape)} that is needed for backward was freed, as sharded "
                "parameters are between forward and backward. Set an activation policy on each part of the model that "
                "is sharded by itself instead of one on the whole."
            )


class Whole(Kept):
    """A tensor as it is, of a sort that is more than a place in a storage."""

    def at(self, place: None) -> Tensor:
        """See :class:`Source`."""
        self.check()
        return self.alias.detach()


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
            if self.shared and _forget_after_backward(self):
                self.made = made
        if place == self.place:
            return made.detach()
        start = made.storage_offset() - self.place.offset
        return _on_storage_of(made, place, place.offset + start * made.itemsize // place.dtype.itemsize)


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
        self,
        call: Call,
        sources: Sequence[Source],
        need_grad: Sequence[bool],
        draws: RandomDraws | None,
        num_saved: int,
    ) -> None:
        self.call, self.need_grad, self.draws, self.num_saved = call, need_grad, draws, num_saved
        self.parents = [(source, parent[1]) for source, parent in zip(sources, call.parents, strict=True)]
        self.memory: list[Any] = [*sources, *([] if draws is None else draws.memory)]
        self.depth = max((source.depth for source in sources), default=0) + 1
        self.made: list[Tensor] | None = None
        self._kernels = _cur_sdpa_kernel_backends(with_priority=True)

    def results(self) -> list[Tensor]:
        """What was saved, in order, and last the output."""
        made = self.made
        if made is None:
            with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
                made = self._run()
            if _forget_after_backward(self):
                self.made = made
        return made

    def _run(self) -> list[Tensor]:
        tensors = [source.at(place) for source, place in self.parents]
        for tensor, needs_grad in zip(tensors, self.need_grad, strict=True):
            tensor.requires_grad_(needs_grad)
        saved: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), _unused)
        same = nullcontext() if self.draws is None else self.draws.repeated()
        with hooks, same, self._same_kernels():
            output = self.call(tensors)
        if len(saved) != self.num_saved:
            raise RuntimeError(
                f"{self.call.func.__name__} saved {self.num_saved} tensors in forward, but {len(saved)} when run "
                "again in backward: a setting of torch that it depends on has changed in between. Leave such settings "
                "alone until backward is over, or use ActivationPolicy(attention='keep')."
            )
        return [*saved, output.detach()]

    def _same_kernels(self) -> AbstractContextManager[Any]:
        """Those of core attention that could be chosen from in forward: each saves other tensors."""
        if self._kernels == _cur_sdpa_kernel_backends(with_priority=True):
            return nullcontext()
        return sdpa_kernel(self._kernels, set_priority=True)


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


def _on_storage_of(tensor: Tensor, place: Place, offset: int) -> Tensor:
    if place.dtype == tensor.dtype:
        return tensor.as_strided(place.size, place.stride, offset)
    other = torch.empty(0, dtype=place.dtype, device=tensor.device)
    return other.set_(tensor.untyped_storage(), offset, place.size, place.stride)


def _laid_out(tensor: Tensor, place: Place) -> Tensor:
    """``tensor`` with the strides of ``place``."""
    if tensor.stride() == place.stride or tensor.numel() < 2:
        return tensor
    return tensor.new_empty_strided(place.size, place.stride).copy_(tensor)


_made_in: weakref.WeakValueDictionary[int, weakref.WeakSet[_Made | Rerun]] = weakref.WeakValueDictionary()
"""Sources that hold a tensor until a backward, given by its number, is over. It alone holds the set: so it is gone
after a backward that raised, and others, on other threads or around this one, are left alone."""


def _forget_after_backward(source: _Made | Rerun) -> bool:
    """Let go of what ``source`` has made when backward is over: a graph that is retained may live on.

    Returns:
        Whether a backward is under way; no one else asks.
    """
    task = torch._C._current_graph_task_id()
    if task == -1:
        return False
    sources = _made_in.get(task)
    if sources is None:
        sources = _made_in[task] = weakref.WeakSet()
        torch.autograd.Variable._execution_engine.queue_callback(partial(_forget, sources))
    sources.add(source)
    return True


def _forget(sources: weakref.WeakSet[_Made | Rerun]) -> None:
    for source in list(sources):
        source.made = None
