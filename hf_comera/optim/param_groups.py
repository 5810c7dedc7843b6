"""Parameter groups: which rate and decay the cores, the other weights, and biases and norms get."""

import math
from typing import Any

import torch
from torch import nn

from hf_comera.modules import TensorTrainModule
from hf_comera.tt.gauge import interface_norms

__all__ = [
    "check_not_negative",
    "check_rate_and_decay",
    "check_whole",
    "comera_param_groups",
    "other_param_groups",
    "take_saved_groups",
    "tensor_train_modules",
]

GRID = 1.25
"""Rates of cores are rounded to powers of this, so that layers of equal shapes share a group."""


def comera_param_groups(
    model: nn.Module, lr: float, *, weight_decay: float = 0.01, gate_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups for ``torch.optim.AdamW`` and its kin, from the learning rate of the dense model.

    A step of AdamW has entries of about ``lr``. On a dense matrix its spectral norm is at most
    ``lr * sqrt(rows * columns)``, reached when all rows agree. A step on core k with entries of ``lr_k`` is at most
    ``lr_k * sqrt(entries of the core)`` long. The other cores stretch it by at most ``|L_k| |R_k|``, the spectral
    norms of the products of the cores on its left and on its right. K cores move at once, so with

        lr_k = lr * sqrt(rows * columns) / (sqrt(K) * |L_k| * |R_k| * sqrt(entries of the core))

    they move the implied matrix as far as AdamW moves a dense one, an equal part each; the root of K since steps of
    different cores hardly overlap. The norms are those of the cores as they are now; rates are rounded by up to 12 %,
    so that layers of equal shapes share groups. Weight decay shrinks the implied matrix as it would the dense one: of
    K cores each has a K-th of it, over its own rate. Biases and norms are not decayed.

    A model that has been trained makes other groups than at its start. ``CoatAdamW`` takes on those of a state that it
    loads; with another optimizer call ``hf_comera.optim.take_saved_groups(optimizer, state["param_groups"])`` first.

    :class:`hf_comera.TTMuon` follows the norms while they change, and learned more wherever both were measured
    (docs/learning.md); this is for other optimizers.

    Args:
        model: A model, compressed or not.
        lr: Learning rate, as for the dense model.
        weight_decay: Decoupled weight decay, meant for the (implied) matrices.
        gate_lr: Learning rate of rank gates, where there are any; default ``lr``. They are never decayed.

    Returns:
        Non-empty groups with ``params``, ``names``, ``lr``, ``weight_decay`` and ``group_name``; every trainable
        parameter is in exactly one.

    Raises:
        ValueError: If a rate is not positive, the decay negative, or one of them not finite. Also if the cores have no
            values yet (meta device), are sharded, or belong to two layers.

    Source:
        Rates per factor of structured matrices: Qiu et al., arXiv:2406.06248; bounding the step of the product:
        arXiv:2602.12429. The rates for tensor trains of any length are ours.
    """
    check_rate_and_decay(lr, weight_decay, gate_lr)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    check_whole(tensor_train_modules(model))
    for name, module in tensor_train_modules(model).items():
        if module.is_removed:
            continue
        cores, rates = module.cores(), core_rates(name, module, lr)
        for place, (core, rate) in enumerate(zip(cores, rates, strict=True)):
            if core.requires_grad:
                rounded = GRID ** round(math.log(rate, GRID))
                key = (rounded, weight_decay * lr / (len(cores) * rounded))  # AdamW multiplies it by the rate again
                _append(groups, key, key, "cores", f"{name}.core_{place}".removeprefix("."), core)
    return list(groups.values()) + other_param_groups(model, lr, weight_decay, gate_lr)


def other_param_groups(
    model: nn.Module, lr: float, weight_decay: float, gate_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups of the trainable parameters that are no cores: weights; biases and norms, which do not decay; gates."""
    layers = tensor_train_modules(model).values()
    cores = {id(core) for module in layers for core in module.cores()}
    gates = {id(gate) for module in layers for gate in module.rank_gates()}
    groups: dict[str, dict[str, Any]] = {}
    rates = {
        "weights": (lr, weight_decay),
        "biases and norms": (lr, 0.0),
        "rank gates": (lr if gate_lr is None else gate_lr, 0.0),
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in cores and parameter.numel() > 0:
            kind = "rank gates" if id(parameter) in gates else "weights" if parameter.ndim >= 2 else "biases and norms"
            _append(groups, kind, rates[kind], kind, name, parameter)
    return list(groups.values())


def core_rates(name: str, module: TensorTrainModule, lr: float) -> list[float]:
    """The rate of each core of ``module`` that corresponds to ``lr`` on its dense matrix.

    Raises:
        ValueError: If the cores are on the meta device.
    """
    cores = module.cores()
    if any(core.is_meta for core in cores):
        raise ValueError(
            f"The cores of {name!r} are on the meta device and have no norms to derive a rate from. Load or "
            "initialise the model before making parameter groups."
        )
    largest_step = lr * math.sqrt(math.prod(module.weight_shape()) / len(cores))
    stretches = interface_norms([core.flatten(1, -2) for core in cores])
    return [
        largest_step / (stretch * math.sqrt(core.numel())) if stretch > 0 else lr  # behind a core that is zero
        for core, stretch in zip(cores, stretches, strict=True)
    ]


def check_whole(layers: dict[str, TensorTrainModule]) -> None:
    """Refuse cores that are sharded or belong to two layers.

    Raises:
        ValueError: If there is such a core.
    """
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        for core in layer.cores():
            if hasattr(core, "placements"):
                raise ValueError(
                    f"The cores of {name!r} are sharded (DTensor), but the norms of whole ones are needed. Use DDP, "
                    "which tensor trains are small enough for, or make the groups before sharding."
                )
            if owners.setdefault(id(core), name) != name:
                raise ValueError(
                    f"{owners[id(core)]!r} and {name!r} share a core. Share the whole layer instead: register one "
                    "module under both names."
                )


def tensor_train_modules(model: nn.Module) -> dict[str, TensorTrainModule]:
    """The layers in tensor-train form by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TensorTrainModule)}


def check_rate_and_decay(lr: float, weight_decay: float, gate_lr: float | None = None) -> None:
    """Refuse rates that are not positive, a negative decay, and what is not finite.

    Raises:
        ValueError: If one of them is out of range.
    """
    check_not_negative("lr", lr, 0.001)
    check_not_negative("weight_decay", weight_decay, 0.01)
    if lr == 0:
        raise ValueError(f"lr={lr} must be positive, for example lr=0.001.")
    if gate_lr is not None and not 0 < gate_lr < math.inf:
        reason = "finite" if gate_lr > 0 else "positive"
        raise ValueError(f"gate_lr={gate_lr} must be {reason}, for example gate_lr=0.001, or None for lr.")


def check_not_negative(name: str, value: float, example: float) -> None:
    """Refuse a setting that is negative, or infinite, or NaN.

    Raises:
        ValueError: If it is.
    """
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite, for example {name}={example}.")
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative, for example {name}={example}.")


def _append(
    groups: dict[Any, dict[str, Any]], key: Any, rates: tuple[float, float], kind: str, name: str, parameter: Any
) -> None:
    """Put ``parameter`` into the group of ``key``; ``rates`` are learning rate and weight decay of a new one."""
    empty = {"params": [], "names": [], "lr": rates[0], "weight_decay": rates[1], "group_name": kind}
    group = groups.setdefault(key, empty)
    group["params"].append(parameter)
    group["names"].append(name)


def take_saved_groups(optimizer: torch.optim.Optimizer, saved_groups: list[dict[str, Any]]) -> None:
    """Put the parameters of ``optimizer`` into the groups of a saved state, if both have names.

    The groups of :func:`comera_param_groups` follow from the norms of the cores, which are others once a model has
    been trained: of a loaded model it makes other groups than those that the state was saved with.

    Raises:
        ValueError: If the names are those of other parameters; nothing is changed then.
    """
    own_groups = optimizer.param_groups
    if not all("names" in group for group in (*own_groups, *saved_groups)):
        return
    own = {name: p for group in own_groups for name, p in zip(group["names"], group["params"], strict=True)}
    saved = [name for group in saved_groups for name in group["names"]]
    if set(own) != set(saved):
        odd = min(set(own) ^ set(saved))
        where = "in the state, but not in the optimizer" if odd in saved else "in the optimizer, but not in the state"
        raise ValueError(
            f"The state is of another model: {odd!r} is {where}. Load the state of the same model, with the same "
            "layers compressed and frozen."
        )
    if [group["names"] for group in own_groups] == [group["names"] for group in saved_groups]:
        return
    own_groups[:] = [{**group, "params": [own[name] for name in group["names"]]} for group in saved_groups]
