"""``set_activation_policy``: put a policy on a model, or take it off."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_comera.memory.policy import ActivationPolicy, LayerPolicy, as_policy

__all__ = ["SavedBytes", "activation_policy", "set_activation_policy"]

_FUNCTION, _SWITCH = "_gradient_checkpointing_func", "gradient_checkpointing"
"""Attributes with which Transformers has a layer checkpointed."""


def set_activation_policy(model: nn.Module, policy: str | ActivationPolicy | None) -> None:
    """Decide what the layers of ``model`` keep from forward to backward while they train.

    A policy uses the same switch of each layer as gradient checkpointing: the later call to this function or to
    ``model.activation_checkpointing_enable()`` or ``..._disable()`` decides, and replaces what was there. As with
    gradient checkpointing, layers take no cache while they train.

    Args:
        model: A model of Transformers, dense or compressed, or a part of one; the later call decides for a layer.
        policy: ``"keep"`` (torch's own way), ``"rank"`` (exact: recomputes cheap results), ``"rank+fp8"`` (recomputes
            attention too, layer inputs in FP8) or ``"fp8"`` (all in FP8, recomputes nothing). Or an
            :class:`ActivationPolicy`; or None, which takes a policy off.

    Raises:
        TypeError: If ``model`` is no module.
        ValueError: If there is no policy of that name, no layer of the model can be checkpointed, or one of them is
            checkpointed by other code. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"set_activation_policy needs a model, a torch.nn.Module, and got {type(model).__name__}.")
    chosen = as_policy(policy)
    layers = list(_layers(model))
    changes_something = chosen is not None and (chosen.recompute or chosen.storage != "keep")
    if changes_something:
        _check(model, layers, policy)
    for layer in layers:
        if _policy_of(layer) is not None:
            del layer.__dict__[_FUNCTION]
            layer.__dict__.pop(_SWITCH, None)
        if chosen is not None and (changes_something or not layer.gradient_checkpointing):
            setattr(layer, _FUNCTION, LayerPolicy(chosen))
            setattr(layer, _SWITCH, changes_something)


def activation_policy(model: nn.Module) -> ActivationPolicy | None:
    """The policy of the layers of ``model``; None without one, or if they do not all have the same."""
    found = {_policy_of(layer) for layer in _layers(model)}
    return found.pop() if len(found) == 1 else None


def _layers(module: nn.Module) -> Iterator[GradientCheckpointingLayer]:
    """The outermost layers that can be checkpointed, shared ones once."""
    seen = set()

    def walk(module: nn.Module) -> Iterator[GradientCheckpointingLayer]:
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, GradientCheckpointingLayer):
            yield module
            return
        for child in module.children():
            yield from walk(child)

    return walk(module)


def _policy_of(layer: nn.Module) -> ActivationPolicy | None:
    function = vars(layer).get(_FUNCTION)
    return function.policy if isinstance(function, LayerPolicy) else None


def _check(model: nn.Module, layers: list[GradientCheckpointingLayer], policy: object) -> None:
    if not layers:
        raise ValueError(
            f"activation policy {policy!r}: {type(model).__name__} has no layer that can be checkpointed, that is, "
            "none derived from transformers.modeling_layers.GradientCheckpointingLayer. Set the policy on a model of "
            "Transformers that has such layers, or use 'keep'."
        )
    foreign = [layer for layer in layers if layer.gradient_checkpointing and _policy_of(layer) is None]
    if foreign:
        raise ValueError(
            f"activation policy {policy!r}: gradient checkpointing is on in {len(foreign)} of the {len(layers)} "
            f"layers of this {type(model).__name__}, and a policy takes its place. Call "
            "model.activation_checkpointing_disable() first, or leave the policy away."
        )


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
