"""``set_activation_policy``: put a policy on a model, or take it off."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_comera.memory.layer_policy import LayerPolicy
from hf_comera.memory.policy import ActivationPolicy, as_policy

__all__ = ["activation_policy", "set_activation_policy"]

_FUNCTION, _SWITCH = "_gradient_checkpointing_func", "gradient_checkpointing"
"""Attributes with which Transformers has a layer checkpointed."""


def set_activation_policy(model: nn.Module, policy: str | ActivationPolicy | None) -> None:
    """Decide what the layers of ``model`` keep from forward to backward while they train.

    A policy uses the same switch of each layer as gradient checkpointing: the later call to this function or to
    ``model.activation_checkpointing_enable()`` or ``..._disable()`` decides, and replaces what was there. As with
    gradient checkpointing, layers take no cache while they train.

    Args:
        model: A model of Transformers, dense or compressed, or a part of one; the later call decides for a layer.
        policy: ``"keep"`` (torch's own way), ``"rank"`` (exact: computes again what is cheap), ``"rank+fp8"`` (the
            same, with attention computed again and layer inputs in FP8), ``"fp8"`` (all in FP8, nothing again), an
            :class:`ActivationPolicy`; or None, which takes a policy off.

    Raises:
        TypeError: If ``model`` is no module.
        ValueError: If there is no policy of that name, no layer of the model can be checkpointed, or one of them is
            checkpointed by somebody else. Nothing is changed then.
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
