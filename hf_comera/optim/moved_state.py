"""State that fits its parameter: it follows a parameter that was moved, and one of other shapes is refused."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["check_saved_shapes", "follow"]


def follow(parameter: nn.Parameter, state: dict[str, Any], key: str) -> None:
    """Take state along to where its parameter was moved to, say by ``model.to(torch.bfloat16)``.

    Args:
        parameter: Of a model that may have been moved since the last step.
        state: Of that parameter, changed in place; ``step`` stays in float32.
        key: Of an entry that has the shape, the dtype and the device of the parameter.

    Raises:
        ValueError: If the parameter has another shape by now.
    """
    like = state[key]
    if like.shape != parameter.shape:
        raise ValueError(
            f"A parameter has shape {tuple(parameter.shape)}, but its {key!r} has {tuple(like.shape)}: the parameter "
            "was given other data. Make a new optimizer after that, or prune with RankAdapter, which slices both."
        )
    if like.dtype == parameter.dtype and like.device == parameter.device:
        return
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.to(parameter.device, value.dtype if name == "step" else parameter.dtype)


def check_saved_shapes(optimizer: torch.optim.Optimizer, loaded: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Refuse a state of parameters of other shapes, say of other ranks.

    Args:
        optimizer: It is to load the state.
        loaded: What its ``load_state_dict`` was given, after all hooks.
        keys: Entries that have the shapes of the parameters, where a parameter has them.

    Raises:
        ValueError: If the shapes are others, or the entries not floating-point nor codes.
    """
    saved = [index for group in loaded["param_groups"] for index in group["params"]]
    for (name, parameter), index in zip(_named(optimizer.param_groups), saved, strict=False):  # torch counts them
        state = loaded["state"].get(index, {})
        for key in keys & state.keys():
            if state[key].shape != parameter.shape:
                raise ValueError(
                    f"The state is of another model: its {key!r} of {name} has shape {tuple(state[key].shape)}, the "
                    f"parameter has {tuple(parameter.shape)}. Load the state that was saved with this model; where "
                    "ranks were pruned, load the model that was saved with the state first."
                )
            if not (state[key].is_floating_point() or f"{key}_scales" in state):
                raise ValueError(
                    f"The state has {key!r} of {name} in {state[key].dtype}, and a floating-point dtype is needed, "
                    "for example torch.float32. Load a state as an optimizer saved it."
                )


def _named(groups: list[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    """All parameters and what they are called, in order."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    names = [repr(name) for group in groups for name in group.get("names", [])]
    if len(names) != len(parameters):
        names = [f"parameter {place}" for place in range(len(parameters))]
    return list(zip(names, parameters, strict=True))
