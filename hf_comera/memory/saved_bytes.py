"""Count the bytes that autograd keeps from forward to backward, with and without a policy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_comera.memory.lineage import is_plain
from hf_comera.memory.session import Session
from hf_comera.memory.sources import Saved, Whole
from hf_comera.ops.kept_aside import hear_of_kept, stop_hearing

__all__ = ["SavedBytes"]


class SavedBytes:
    """Context in which what autograd saves is counted; each storage once.

    It counts what is still kept when the context is left; of tensors that are more than a storage, their entries. What
    halves keep for their own backward is counted where they are built within.

    ::

        with SavedBytes(model.parameters()) as saved:
            loss = model(**batch).loss
        print(saved.total)

    Args:
        parameters: Tensors that are there anyway and not counted.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._uncounted = {tensor.untyped_storage()._cdata for tensor in parameters}
        self._saved: weakref.WeakSet[Whole] = weakref.WeakSet()
        self._kept_aside: list[weakref.ref[Tensor]] = []
        self._sessions: list[Session] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, Saved.tensor)
        self.total = 0
        """Bytes, once the context has been left."""

    def __enter__(self) -> SavedBytes:
        _present().append(self)
        self._hooks.__enter__()
        hear_of_kept(self._note_kept_aside)
        return self

    def __exit__(self, *exception: Any) -> None:
        stop_hearing(self._note_kept_aside)
        self._hooks.__exit__(*exception)
        _present().remove(self)
        found: dict[int, int] = {}
        kept_aside = [tensor for reference in self._kept_aside if (tensor := reference()) is not None]
        sources = [source for session in self._sessions for source in session.claims.sources]
        for item in [*self._saved, *kept_aside, *sources]:
            self._count(item, found)
        self.total = sum(found.values())
        self._sessions, self._kept_aside = [], []

    @staticmethod
    def add(session: Session) -> None:
        """Count what ``session`` saves, wherever it is being counted."""
        for counter in _present():
            counter._sessions.append(session)

    def _note_kept_aside(self, tensors: Iterable[Tensor]) -> None:
        self._kept_aside += [weakref.ref(tensor) for tensor in tensors]

    def _note(self, tensor: Tensor) -> Saved:
        source = Whole(tensor)
        self._saved.add(source)
        return Saved(source, None)

    def _count(self, item: Any, found: dict[int, int]) -> None:
        if isinstance(item, Tensor) and is_plain(item):
            storage = item.untyped_storage()
            if storage._cdata not in self._uncounted:
                found[storage._cdata] = storage.nbytes()
        elif isinstance(item, Tensor):
            found[id(item)] = item.numel() * item.itemsize
        elif hasattr(item, "nbytes"):
            found[id(item)] = item.nbytes
        else:
            for part in item.memory:
                self._count(part, found)


_local = threading.local()


def _present() -> list[SavedBytes]:
    if not hasattr(_local, "present"):
        _local.present = []
    present: list[SavedBytes] = _local.present
    return present
