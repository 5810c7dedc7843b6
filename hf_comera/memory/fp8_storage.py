"""Storage in FP8 of one forward pass of a layer: of tensors that autograd or checkpointing saves.

Source: COAT, arXiv:2410.19313, section 5.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_comera.ops.fp8 import ACTIVATION_GROUP_SIZE, Fp8Tensor, store_by_group
from hf_comera.ops.selective import Kept

__all__ = ["Fp8Activations", "Fp8Input", "store_kept"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Storage:
    """The memory of a tensor in FP8, in groups of neighbours; decoded once for all who need it at a time."""

    def __init__(self, tensor: Tensor) -> None:
        self.owner = weakref.ref(tensor.untyped_storage())
        self.version = tensor._version
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.codes: Fp8Tensor = store_by_group(tensor.detach().as_strided((size,), (1,), 0))
        self.decoded: weakref.ref[Tensor] | None = None

    def decode(self) -> Tensor:
        flat = None if self.decoded is None else self.decoded()
        if flat is None:
            flat = self.codes.decode()
            self.decoded = weakref.ref(flat)
        return flat


class _InFp8(Kept):
    """A view of what is stored."""

    def __init__(self, tensor: Tensor, storage: _Storage) -> None:
        self._storage, self._shape = storage, tensor.shape
        self._strides, self._offset = tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        """It, as it was but for FP8's rounding."""
        return self._storage.decode().as_strided(self._shape, self._strides, self._offset)


class _Exact(NamedTuple):
    tensor: Tensor
    version: int


class _Hooks(saved_tensors_hooks):
    """Each storage is stored once, however many views of it are saved."""

    def __init__(self, min_bytes: int) -> None:
        super().__init__(self._pack, _unpack)
        self._min_bytes = min_bytes
        self._stored: dict[tuple[int, torch.dtype], _Storage] = {}

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stored.clear()  # torch refers to these hooks and they to it: codes would wait for the garbage collector

    def stores(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which is large, is stored in FP8."""
        raise NotImplementedError

    def _pack(self, tensor: Tensor) -> _InFp8 | _Exact:
        with torch._C.DisableTorchFunction():
            if not _is_large(tensor, self._min_bytes):
                return _Exact(tensor, tensor._version)
            memory = tensor.untyped_storage()
            key = memory._cdata, tensor.dtype
            stored = self._stored.get(key)
            # the same address may belong to another tensor by now, or have been written to
            if stored is None or stored.owner() is not memory or stored.version != tensor._version:
                if not self.stores(tensor):
                    return _Exact(tensor, tensor._version)
                stored = self._stored[key] = _Storage(tensor)
            return _InFp8(tensor, stored)


def _is_large(tensor: Tensor, min_bytes: int) -> bool:
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or tensor.nbytes < max(min_bytes, 1):
        return False
    return 4 * tensor.nbytes >= tensor.untyped_storage().nbytes()  # a slice of a large tensor stays a slice


def _unpack(saved: _InFp8 | _Exact) -> Tensor:
    if isinstance(saved, _InFp8):
        return saved.tensor()
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"A tensor of shape {tuple(saved.tensor.shape)} that is needed for gradients was modified in place: it is "
            f"at version {saved.tensor._version}, expected version {saved.version}."
        )
    return saved.tensor


class Fp8Input(_Hooks):
    """Stores a layer's input, as checkpointing saves it, and no other argument: masks need to be exact."""

    def __init__(self, hidden: Tensor, min_bytes: int) -> None:
        super().__init__(min_bytes)
        self._place, self._shape = hidden.untyped_storage()._cdata, hidden.shape

    def stores(self, tensor: Tensor) -> bool:
        """Whether it is the input."""
        return tensor.untyped_storage()._cdata == self._place and tensor.shape == self._shape


class Fp8Activations(_Hooks):
    """All activations of a layer: tensors that have rows of features for the tokens of the input.

    Everything else stays exact: weights, statistics, masks, what the layer is given beside its input, and scores,
    in which a mask may have put infinities.

    Args:
        hidden: The input, ``(..., T, C)``.
        others: What the layer is given besides, and its weights.
        min_bytes: Smaller tensors stay exact.
    """

    def __init__(self, hidden: Tensor, others: Iterable[Tensor], min_bytes: int) -> None:
        super().__init__(min_bytes)
        tensors = [tensor for tensor in others if tensor is not hidden]
        self._rows, self._batch, self._length = hidden.shape[:-1].numel(), hidden.shape[0], hidden.shape[-2]
        self._exact = {tensor.untyped_storage()._cdata for tensor in tensors}
        wide = [tensor for tensor in tensors if tensor.dim() > 2]
        self._lengths = {self._length, *(tensor.shape[-2 if tensor.dim() == 3 else -1] for tensor in wide)}

    def stores(self, tensor: Tensor) -> bool:
        """Whether it is an activation."""
        shape = tensor.shape
        if tensor.dim() < 2 or shape[-1] < ACTIVATION_GROUP_SIZE or tensor.untyped_storage()._cdata in self._exact:
            return False
        if tensor.dim() == 2:
            return shape[0] == self._rows
        are_scores = shape[-1] in self._lengths and (tensor.dim() > 3 or shape[0] != self._batch)
        return shape[0] % self._batch == 0 and self._length in shape[1:3] and not are_scores


def store_kept(kept: dict[Any, Any], min_bytes: int) -> None:
    """Store in FP8 what selective checkpointing keeps: results of products and blocks, and the first of attention.

    Args:
        kept: The results by operator and number; exchanged in place.
        min_bytes: Smaller tensors stay exact.
    """
    for key, result in kept.items():
        first, *others = result if isinstance(result, tuple | list) else (result,)
        if isinstance(first, Kept) and _is_large(tensor := first.tensor(), min_bytes):
            stored = _InFp8(tensor, _Storage(tensor))
            kept[key] = (stored, *others) if isinstance(result, tuple | list) else stored
