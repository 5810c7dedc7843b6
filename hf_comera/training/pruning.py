"""Cut ranks out of a model for real: cores, gates and the state of the optimizer, all at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_comera.modules import TensorTrainModule
from hf_comera.training.plain_state import plain_state, set_plain_state
from hf_comera.tt.gates import slice_core
from hf_comera.tt.norms import finite_norms

__all__ = ["cut_ranks", "drop_removed", "drop_removed_when_loading"]

Slicer = Callable[[Tensor], Tensor]


@torch.no_grad()
def cut_ranks(
    layers: Mapping[str, TensorTrainModule],
    kept: Mapping[str, Sequence[Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Keep only some ranks of each layer; a layer without any rank on a bond is removed (it becomes its bias).

    Cores and gates become new parameters. In the optimizer they take the place of the old ones, and every tensor of
    the old one's state that has its shape is sliced as it is; quantised moments are decoded, sliced and encoded.
    Parameters of removed layers leave the optimizer.

    Args:
        layers: Layers by name.
        kept: For the layers that change, the indices of the ranks to keep on each inner bond, ``int64``.
        optimizer: An optimizer of these parameters whose state has their shapes (or one entry), or None. Accelerate's
            wrapper is looked through.

    Raises:
        ValueError: If a layer has another number of bonds, the optimizer lacks a trainable core or gate, or its state
            of one has another shape, as that of Adafactor; nothing is changed then.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    slicers: dict[nn.Parameter, tuple[nn.Module, str, Slicer]] = {}
    for name, indices in kept.items():
        slicers |= _slicers(name, layers[name], indices)
    if optimizer is not None:
        _check_held(optimizer, slicers)
    for old, (layer, name, slicer) in slicers.items():
        new = nn.Parameter(slicer(old), requires_grad=old.requires_grad)
        new.requires_grad_(old.requires_grad and new.numel() > 0)
        if old.grad is not None and new.numel() > 0:
            new.grad = slicer(old.grad)
        setattr(layer, name, new)
        if optimizer is not None:
            _replace(optimizer, old, new, slicer)
    if optimizer is not None:
        drop_removed(optimizer)


def drop_removed(optimizer: torch.optim.Optimizer) -> None:
    """Take parameters without entries, those of removed layers, out of the optimizer and its state."""
    for group in optimizer.param_groups:
        alive = [parameter.numel() > 0 for parameter in group["params"]]
        if all(alive):
            continue
        if group.get("trains") is not None:  # TTMuon's record of how the cores belong together
            starts = torch.tensor([0, *(train[0] for train in group["trains"])]).cumsum(0).tolist()
            group["trains"] = [train for train, start in zip(group["trains"], starts, strict=False) if alive[start]]
        for parameter, lives in zip(group["params"], alive, strict=True):
            if not lives:
                optimizer.state.pop(parameter, None)
        for key in ("params", "names", "param_names"):
            if key in group:
                group[key] = [item for item, lives in zip(group[key], alive, strict=True) if lives]


def drop_removed_when_loading(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer.load_state_dict`` begin with :func:`drop_removed` where the state is one without removed layers.

    Accelerate, when it prepares an optimizer, also loads the optimizer's own state into it, which has them.
    """

    def drop(own: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        held, saved = ([len(group["params"]) for group in x] for x in (own.param_groups, state["param_groups"]))
        if held != saved:
            drop_removed(own)

    optimizer.register_load_state_dict_pre_hook(drop)


def _slicers(
    name: str, layer: TensorTrainModule, indices: Sequence[Tensor]
) -> dict[nn.Parameter, tuple[nn.Module, str, Slicer]]:
    """How each core and gate of a layer is cut."""
    if len(indices) != layer.num_cores - 1:
        raise ValueError(
            f"kept[{name!r}] has {len(indices)} entries, but the layer has {layer.num_cores - 1} inner bonds. Give "
            "the indices of the ranks to keep for each."
        )
    device = layer.core_0.device
    if any(len(index) == 0 for index in indices):
        indices = [index[:0] for index in indices]
    bonds: list[Tensor | None] = [None, *(index.to(device) for index in indices), None]
    found: dict[nn.Parameter, tuple[nn.Module, str, Slicer]] = {}
    for place, core in enumerate(layer.cores()):
        before, behind = bonds[place], bonds[place + 1]
        found[core] = (layer, f"core_{place}", lambda t, a=before, b=behind: slice_core(t, a, b))
    for place, gate in enumerate(layer.rank_gates()):
        found[gate] = (layer, f"rank_gate_{place}", lambda t, a=bonds[place + 1]: slice_core(t, None, a))
    return found


def _check_held(optimizer: torch.optim.Optimizer, slicers: Mapping[nn.Parameter, Any]) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    needed = {parameter: name for parameter, (_, name, _) in slicers.items() if parameter.requires_grad}
    lacking = [name for parameter, name in needed.items() if parameter.numel() and id(parameter) not in held]
    if lacking:
        raise ValueError(
            f"The optimizer lacks {len(lacking)} trainable cores or gates of the model, for example {lacking[0]}. "
            "Make the optimizer of the model as it is now, for example TTMuon(model)."
        )
    for parameter, (_, name, _) in slicers.items():
        for key, value in plain_state(optimizer, parameter).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name} of shape "
                    f"{tuple(parameter.shape)}, which cannot be cut along with it. Use an optimizer whose state has "
                    "the shapes of the parameters, for example TTMuon(model) or AdamW."
                )


def _replace(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, slicer: Slicer) -> None:
    """Put ``new`` where ``old`` was, with its state sliced."""
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    if old in optimizer.state:
        state = plain_state(optimizer, old)
        del optimizer.state[old]
        sliced = {
            key: slicer(value) if isinstance(value, Tensor) and value.shape == old.shape else value
            for key, value in state.items()
        }
        if "mean_norm" in state and new.numel() > 0:  # TTMuon's certainty is the ratio of both
            norms = finite_norms([part["momentum_buffer"] for part in (sliced, state)])
            sliced["mean_norm"] = state["mean_norm"] * norms[0] / norms[1].clamp_min(1e-30)
        set_plain_state(optimizer, new, sliced)
