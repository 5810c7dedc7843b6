"""The optimizers of the memory benchmark by name, those of other packages included where they are installed."""

import importlib
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from hf_comera import CoatAdamW, TTMuon, comera_param_groups

__all__ = ["make_optimizer", "why_absent"]

LR = 1e-4
PROJECTION = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
"""GaLore's, as in its examples."""
PACKAGES = {"galore": "galore_torch", "galore, embedding too": "galore_torch", "adamw8bit": "bitsandbytes"}


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """The optimizer of all parameters of ``model``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # GaLore's AdamW calls itself deprecated
        return _MAKERS[name](model)


def why_absent(name: str) -> str | None:
    """What is missing for this optimizer; None if it can be made."""
    package = PACKAGES.get(name)
    if package is None:
        return None
    try:
        importlib.import_module(package)
    except Exception as problem:  # a package that does not fit this machine may raise anything
        pip_name = package.replace("_", "-")
        return f"{package} cannot be imported ({problem}); pip install {pip_name}"
    return None


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(comera_param_groups(model, LR), lr=LR, fused=True)


def _coat_adamw(model: nn.Module) -> Optimizer:
    return CoatAdamW(comera_param_groups(model, LR), lr=LR)


def _tt_muon(model: nn.Module) -> Optimizer:
    return TTMuon(model, LR)


def _adamw_8bit(model: nn.Module) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=LR)


def _galore(model: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.Linear,)) -> Optimizer:
    """GaLore's AdamW: moments of projected gradients for the weights of layers of these kinds."""
    from galore_torch import GaLoreAdamW

    projected = [
        module.weight
        for module in model.modules()
        if isinstance(module, kinds) and min(module.weight.shape) > PROJECTION["rank"]
    ]
    known = set(map(id, projected))
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups = [{"params": others}, *([{"params": projected, **PROJECTION}] if projected else [])]
    return GaLoreAdamW(groups, lr=LR)


_MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw_8bit,
    "coat_adamw": _coat_adamw,
    "galore": _galore,
    "galore, embedding too": lambda model: _galore(model, (nn.Linear, nn.Embedding)),
    "tt_muon": _tt_muon,
}
