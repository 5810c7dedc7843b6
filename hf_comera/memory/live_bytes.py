"""Bytes of the tensors that are alive, now and at most, as operations make them and the program lets them go."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Mode that counts the storages that operations within it return; what was there before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {item.untyped_storage()._cdata for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, Tensor) and item.untyped_storage()._cdata not in given:
                self._count(item)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages[key] = weakref.ref(storage, lambda _: self._let_go(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _let_go(self, key: int, size: int) -> None:
        del self._storages[key]
        self.now -= size
