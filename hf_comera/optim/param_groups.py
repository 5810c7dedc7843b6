"""Parameter groups: which rate and decay the cores, the other weights, and biases and norms get."""

from typing import Any

from torch import nn

from hf_comera.modules import TensorTrainModule

__all__ = ["comera_param_groups"]


def comera_param_groups(
    model: nn.Module, lr: float, *, weight_decay: float = 0.01, core_lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for ``torch.optim.AdamW`` and others that take ``lr`` and ``weight_decay`` per group.

    A step on one core moves the whole implied matrix, and decaying each of K cores decays the matrix K times; so cores
    have a group of their own, with ``weight_decay`` divided by their number. Biases and norms are not decayed.

    Args:
        model: A model, compressed or not.
        lr: Learning rate.
        weight_decay: Decoupled weight decay, meant for the (implied) matrices.
        core_lr_scale: Factor between ``lr`` and the rate of the cores.

    Returns:
        Non-empty groups with ``params``, ``names``, ``lr``, ``weight_decay`` and ``group_name``; every trainable
        parameter is in exactly one.

    Raises:
        ValueError: If a rate is not positive or the decay negative.
    """
    for name, value in (("lr", lr), ("core_lr_scale", core_lr_scale)):
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive, for example {name}={1e-3 if name == 'lr' else 1.0}.")
    if weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay} must not be negative, for example 0.01.")
    orders = {
        f"{name}.core_{index}" if name else f"core_{index}": module.num_cores
        for name, module in model.named_modules()
        if isinstance(module, TensorTrainModule)
        for index in range(module.num_cores)
    }
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind, rate, decay = "weights", lr, weight_decay
        if name in orders:
            kind, rate, decay = "cores", lr * core_lr_scale, weight_decay / orders[name]
        elif parameter.ndim < 2:
            kind, decay = "biases and norms", 0.0
        group = groups.setdefault(
            (kind, decay), {"params": [], "names": [], "lr": rate, "weight_decay": decay, "group_name": kind}
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())
