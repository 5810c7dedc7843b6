"""How large would the entries of each dense weight be? Asks the model's own initialiser, without a weight in memory.

Architectures differ (0.02, scaled by depth in GPT-2, by width in T5), so the initialiser is run on the meta device,
where filling a tensor costs nothing, and the distributions it asks for are recorded.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

__all__ = ["initial_stds"]


def initial_stds(model: PreTrainedModel) -> dict[str, float]:
    """Standard deviation of the initial entries of each parameter of a model on the meta device.

    Parameters that no initialiser of the architecture fills are left out.
    """
    recorder = _RecordDistributions()
    with recorder, torch.no_grad():
        _initialize(model, model)
    return {
        name: recorder.stds[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in recorder.stds
    }


def _initialize(module: nn.Module, owner: PreTrainedModel) -> None:
    """Initialise as Transformers does: children before parents, each by the nearest model above it.

    A vision tower inside a language model has deviations of its own, and the model around both may have none.
    """
    for child in module.children():
        _initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)


class _RecordDistributions(TorchDispatchMode):
    """Follows in-place fills of meta tensors and keeps the deviation each tensor would have."""

    def __init__(self) -> None:
        super().__init__()
        self.stds: dict[int, float] = {}
        self._alive: list[Tensor] = []  # ids are only unique among living objects

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        update = _UPDATES.get(func._schema.name)
        if update is not None and isinstance(args[0], Tensor):
            tensor = args[0]
            self._alive.append(tensor)
            self.stds[id(tensor)] = update(self.stds.get(id(tensor), 0.0), list(args[1:]), kwargs)
        return func(*args, **kwargs)


def _normal(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("std", 1.0))


def _uniform(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    low = args[0] if args else kwargs.get("from", 0.0)
    high = args[1] if len(args) > 1 else kwargs.get("to", 1.0)
    return float(high - low) / math.sqrt(12.0)


def _erfinv(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    """``trunc_normal_`` of torch maps a uniform draw on (-1, 1) through erfinv: a normal of deviation 1/sqrt(2)."""
    return math.sqrt(0.5)


def _scale(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    return std * abs(float(args[0])) if not isinstance(args[0], Tensor) else std


def _constant(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    return 0.0


_UPDATES: dict[str, Callable[[float, list[Any], dict[str, Any]], float]] = {
    "aten::normal_": _normal,
    "aten::uniform_": _uniform,
    "aten::erfinv_": _erfinv,
    "aten::mul_": _scale,
    "aten::fill_": _constant,
    "aten::zero_": _constant,
}
