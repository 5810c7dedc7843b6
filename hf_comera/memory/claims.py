"""Which source backward gets each tensor from: decided when the first one asks."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from hf_comera.memory.lineage import Lineage, Node, Place
from hf_comera.memory.policy import ActivationPolicy
from hf_comera.memory.sources import Kept, Packed, Rebuilt, RerunOutput, Source, Whole
from hf_comera.ops.bit_mask import BitMask
from hf_comera.ops.fp8_activations import store_by_group, store_by_tensor

__all__ = ["Claims", "storage_bytes"]


class Claims:
    """Finds sources under a policy.

    A tensor is rebuilt if all that its call took in can be had in backward: because autograd keeps it anyway, because
    it can be rebuilt itself, or because it is much smaller.
    """

    def __init__(self, policy: ActivationPolicy, lineage: Lineage) -> None:
        self.policy, self.lineage = policy, lineage
        self.sources: weakref.WeakSet[Source] = weakref.WeakSet()
        """Of all tensors that autograd has saved and not yet let go."""

    def claim(self, node: Node, tensor: Tensor, *, for_product: bool = False) -> Source:
        """The source of a tensor on the storage of ``node``; for_product: FP8 has one scale for all of it."""
        source = node.find_source()
        if source is None and self.is_large(tensor):
            source = self._rebuilt(node, storage_bytes(tensor), self.policy.depth)
        if source is None:
            source = self._in_fp8(node, tensor, for_product) or self._as_bits(tensor) or Kept(tensor)
        if isinstance(source, Rebuilt):
            source.shared = True
        return self.note(node, source)

    def claim_exact(self, node: Node, tensor: Tensor) -> Source:
        """The same where backward does not bear FP8's rounding, also not of what the tensor is rebuilt from."""
        if self.policy.rest != "fp8":
            return self.claim(node, tensor)
        source = node.find_source()
        if source is None:
            return self.note(node, Kept(tensor))
        if not isinstance(source, Kept):  # in FP8 for somebody else
            source = Kept(tensor)
            self.sources.add(source)
        return source

    def keep(self, tensor: Tensor) -> Source:
        """The source of a tensor that is kept as it is."""
        node = self.lineage.node(tensor)
        return self.note(node, node.find_source() or self._as_bits(tensor) or Kept(tensor))

    def keep_whole(self, tensor: Tensor) -> Source:
        """The source of a tensor that is not plain, which is kept as it is."""
        source = Whole(tensor)
        self.sources.add(source)
        return source

    def note(self, node: Node, source: Source) -> Source:
        """Make ``source`` that of ``node``."""
        node.source = weakref.ref(source)
        self.sources.add(source)
        return source

    def is_large(self, tensor: Tensor) -> bool:
        """Whether something can be spared."""
        return storage_bytes(tensor) >= self.policy.min_bytes

    def _rebuilt(self, node: Node, worth: int, depth: int) -> Source | None:
        """The source of ``node`` without keeping anything that is not much smaller than ``worth`` bytes.

        At most ``depth`` tensors are rebuilt one from another for it.
        """
        source = node.find_source()
        if source is not None:
            if isinstance(source, Rebuilt):
                source.shared = True
            return source
        if node.parameter is not None and node.parameter._version == node.version:
            return Kept(node.parameter)
        call = node.call
        if depth == 0 or call is None or not self.policy.rebuilds(call.kind):
            return self._much_smaller(node, worth)
        rerun = None if call.rerun is None else call.rerun()
        if rerun is not None:
            return RerunOutput(rerun, -1, node.place)
        if call.kind == "attention":  # without its random numbers
            return None
        sources = []
        for parent, _ in call.parents:
            source = self._rebuilt(parent, worth, depth - 1)
            if source is None:
                return self._much_smaller(node, worth)
            sources.append(source)
        rebuilt = Rebuilt(call, sources, node.place)
        if rebuilt.depth > self.policy.depth:
            return None
        node.source = weakref.ref(rebuilt)
        return rebuilt

    def _much_smaller(self, node: Node, worth: int) -> Source | None:
        tensor = node.tensor()
        if tensor is None or self.lineage.find(tensor) is not node or 4 * storage_bytes(tensor) > worth:
            return None
        return self.note(node, Kept(tensor.detach().clone()))  # autograd does not mind if it is written to

    def _in_fp8(self, node: Node, tensor: Tensor, for_product: bool) -> Source | None:
        if self.policy.rest != "fp8" or node.is_weight or not tensor.requires_grad or not self.is_large(tensor):
            return None
        if not tensor.is_floating_point() or tensor.ndim < 2:
            return None
        place = node.place if covers_storage(node.place, tensor) else Place.of(tensor)
        if not covers_storage(place, tensor):
            return None
        whole = tensor.detach().as_strided(place.size, place.stride, place.offset)
        return Packed(store_by_tensor(whole) if for_product else store_by_group(whole), place)

    def _as_bits(self, tensor: Tensor) -> Source | None:
        place = Place.of(tensor)
        if tensor.dtype != torch.bool or self.policy.dropout != "bits" or not covers_storage(place, tensor):
            return None
        return Packed(BitMask.of(tensor), place) if self.is_large(tensor) else None


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the whole storage of ``tensor``."""
    return tensor.untyped_storage().nbytes()


def covers_storage(place: Place, tensor: Tensor) -> bool:
    """Whether a tensor at ``place`` has all entries of the storage of ``tensor``, once each."""
    if place.dtype != tensor.dtype or place.offset:
        return False
    expected = 1
    for stride, size in sorted(zip(place.stride, place.size, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return expected * tensor.itemsize == storage_bytes(tensor)
