"""Count the bytes that a forward pass leaves alive, and the most that are alive at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["SavedBytes"]


class SavedBytes(TorchDispatchMode):
    """Context in which the storages that operations allocate are counted for as long as they are alive; each once.

    Of a forward pass those are left that autograd saves for backward, and the results that are still held.
    Inputs and parameters were there before and are not counted. Compiled code runs uncompiled within.

    ::

        with SavedBytes(model.parameters()) as saved:
            loss = model(**batch).loss
        print(saved.total)

    Args:
        parameters: Tensors that are not counted although they may be made within.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._uncounted = {tensor.untyped_storage()._cdata for tensor in parameters}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """The most that were alive at a time since the context was entered."""
        self.total = 0
        """Bytes that were alive when the context was left."""

    def __enter__(self) -> SavedBytes:
        self._storages, self.now, self.peak, self.total = {}, 0, 0, 0
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.total = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call, and count what it allocates."""
        given = {item.untyped_storage()._cdata for item in tree_leaves((args, kwargs)) if _has_storage(item)}
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if _has_storage(item) and item.untyped_storage()._cdata not in given:
                self._count(item)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage, storages = tensor.untyped_storage(), self._storages
        key, size = storage._cdata, storage.nbytes()
        if key in storages or key in self._uncounted:
            return
        storages[key] = weakref.ref(storage, lambda _: self._let_go(storages, key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _let_go(self, storages: dict[int, Any], key: int, size: int) -> None:
        del storages[key]
        if storages is self._storages:
            self.now -= size


def _has_storage(item: Any) -> bool:
    return isinstance(item, Tensor) and item.layout == torch.strided
