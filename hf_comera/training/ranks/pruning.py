"""Cut ranks out of a model for real: cores, gates and the state of the optimizer, all at once."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_comera.modules import TensorTrainModule
from hf_comera.optim import CoatAdamW
from hf_comera.tt.cores import finite_norms, slice_core
from hf_comera.tt.gauge import canonical_bases, to_basis

__all__ = [
    "check_moments",
    "cut_ranks",
    "drop_removed",
    "drop_removed_when_loading",
    "plain_state",
    "set_plain_state",
    "to_canonical_basis",
]

Slicer = Callable[[Tensor], Tensor]


@torch.no_grad()
def cut_ranks(
    layers: Mapping[str, TensorTrainModule],
    kept: Mapping[str, Sequence[Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Keep only some ranks of each layer; a layer without any rank on a bond is removed (it becomes its bias).

    Cores and gates become new parameters. In the optimizer they take the place of the old ones. Every tensor of an old
    parameter's state that has its shape is sliced with it; quantised moments are decoded, sliced and encoded.
    Parameters of removed layers leave the optimizer.

    Args:
        layers: Layers by name.
        kept: For the layers that change, the indices of the ranks to keep on each inner bond, ``int64``.
        optimizer: An optimizer of these parameters whose state has their shapes (or one entry), or None. Accelerate's
            wrapper is looked through.

    Raises:
        ValueError: If a layer has another number of bonds, or the optimizer lacks a trainable core or gate. Also if
            its state of one has another shape, as Adafactor's has. Nothing is changed then.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    slicers: dict[Tensor, tuple[nn.Module, str, Slicer]] = {}
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
) -> dict[Tensor, tuple[nn.Module, str, Slicer]]:
    """How each core and gate of a layer is sliced."""
    if len(indices) != layer.num_cores - 1:
        raise ValueError(
            f"kept[{name!r}] has {len(indices)} entries, but the layer has {layer.num_cores - 1} inner bonds. Give "
            "the indices of the ranks to keep for each."
        )
    device = layer.core_0.device
    if any(len(index) == 0 for index in indices):
        indices = [index[:0] for index in indices]
    bonds: list[Tensor | None] = [None, *(index.to(device) for index in indices), None]
    found: dict[Tensor, tuple[nn.Module, str, Slicer]] = {}
    for place, core in enumerate(layer.cores()):
        before, behind = bonds[place], bonds[place + 1]
        found[core] = (layer, f"core_{place}", partial(slice_core, before=before, behind=behind))
    for place, gate in enumerate(layer.rank_gates()):
        found[gate] = (layer, f"rank_gate_{place}", partial(slice_core, before=None, behind=bonds[place + 1]))
    return found


def _check_held(optimizer: torch.optim.Optimizer, slicers: Mapping[Tensor, Any]) -> None:
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
                    f"{tuple(parameter.shape)}, which cannot be sliced with it. Use an optimizer whose state has "
                    "the shapes of the parameters, for example TTMuon(model) or AdamW."
                )


def _replace(optimizer: torch.optim.Optimizer, old: Tensor, new: nn.Parameter, slicer: Slicer) -> None:
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


_GRADIENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg", "prev"})
_SQUARES_OF_GRADIENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
_SIZES_OF_GRADIENTS = frozenset({"exp_inf"})
_SQUARES_OF_STEPS = frozenset({"acc_delta"})
_SIZES_OF_STEPS = frozenset({"step_size"})
_PARAMETERS = frozenset({"ax"})
_SQUARES, _SIZES = _SQUARES_OF_GRADIENTS | _SQUARES_OF_STEPS, _SIZES_OF_GRADIENTS | _SIZES_OF_STEPS
_KNOWN = _GRADIENTS | _SQUARES | _SIZES | _PARAMETERS
"""State of torch's optimizers in the shape of a parameter, grouped by its origin."""


@torch.no_grad()
def to_canonical_basis(layers: Mapping[str, TensorTrainModule], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Change the basis of every bond to the canonical one; outputs of the layers change by rounding only.

    Gates are folded into the cores and start at one again. First moments of cores move as gradients do, exactly. First
    moments of RMSprop are steps, and move as the cores. Squares and sizes move as if the entries of a gradient, or of
    a step, were independent. Ranks of gates are new mixtures, so their moments become the typical value of their bond.

    Args:
        layers: Layers by name, with or without gates.
        optimizer: Theirs.

    Returns:
        The singular values of all bonds, layer by layer.

    Raises:
        ValueError: If cores are not finite, or there is state of which is not known how it moves; nothing has changed.
    """
    check_moments(layers, optimizer)
    spectra: list[Tensor] = []
    for name, layer in layers.items():
        gates = layer.rank_gates()
        if not all(core.isfinite().all() for core in layer.gated_cores()):
            raise ValueError(
                f"The cores of {name!r} hold NaN or infinity: the training diverged. Go back to a checkpoint, and "
                "lower the learning rate."
            )
        bases, inverses, singular_values = canonical_bases(layer.gated_cores())
        for place, core in enumerate(layer.cores()):
            gate = None if place == len(bases) or not gates else gates[place].double()
            change = _changes(place, gate, bases, inverses)
            state = plain_state(optimizer, core)
            core.copy_(to_basis(core, *change.of_core))
            _move_moments(state, core, change)
            set_plain_state(optimizer, core, state)
        for gate in gates:
            gate.fill_(1)
            state = plain_state(optimizer, gate)
            _typical_moments(state, gate)
            set_plain_state(optimizer, gate, state)
        spectra += singular_values
    return spectra


def check_moments(layers: Mapping[str, TensorTrainModule], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer with state of which is not known how it moves with the basis.

    Raises:
        ValueError: If there is such state.
    """
    for name, layer in layers.items():
        for parameter in layer.tt_parameters():
            for key, value in plain_state(optimizer, parameter).items():
                moves = key in _KNOWN and value is not None
                if isinstance(value, Tensor) and value.numel() > 1 and (not moves or value.shape != parameter.shape):
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a core or gate "
                        f"of {name!r}, of shape {tuple(parameter.shape)}. How that changes with its ranks is not "
                        "known. Use TTMuon(model), or AdamW, Adam, SGD or another of torch's optimizers."
                    )


class _Change(NamedTuple):
    """The matrices by which a core, and a gradient of it, are multiplied on its left and its right bond."""

    of_core: tuple[Tensor | None, Tensor | None]
    of_gradient: tuple[Tensor | None, Tensor | None]


def _changes(place: int, gate: Tensor | None, bases: list[Tensor], inverses: list[Tensor]) -> _Change:
    """The change of the core at ``place``; its gradients are divided by the matrices that multiply the core."""
    first, last = place == 0, place == len(bases)
    before = (None, None) if first else (inverses[place - 1], bases[place - 1].mT)
    behind: tuple[Tensor | None, Tensor | None] = (None, None)
    if not last:
        scale, shrink = (1.0, 1.0) if gate is None else (gate.unsqueeze(1), _reciprocal(gate))
        behind = (scale * bases[place], shrink * inverses[place].mT)
    return _Change((before[0], behind[0]), (before[1], behind[1]))


def _move_moments(state: dict[str, Any], core: Tensor, change: _Change) -> None:
    for key in state.keys() & _KNOWN:
        value = state[key]
        if not isinstance(value, Tensor) or value.shape != core.shape:
            continue
        norm = finite_norms([value])[0]
        is_step = key in _PARAMETERS | _SQUARES_OF_STEPS | _SIZES_OF_STEPS
        if key == "momentum_buffer" and "square_avg" in state:  # RMSprop's is no gradient, but a step
            is_step = True
        factors: tuple[Tensor | None, ...] = change.of_core if is_step else change.of_gradient
        if key in _SQUARES | _SIZES:
            factors = tuple(None if part is None else part.square() for part in factors)
        value.copy_(to_basis(value.square(), *factors).sqrt() if key in _SIZES else to_basis(value, *factors))
        if key == "momentum_buffer" and "mean_norm" in state:  # TTMuon's certainty is the ratio of both
            state["mean_norm"].mul_(finite_norms([value])[0] / norm.clamp_min(torch.finfo(norm.dtype).tiny))


def _reciprocal(gate: Tensor) -> Tensor:
    """``1 / gate`` as a column; 0 for a gate of zero, behind which there was no gradient."""
    return torch.where(gate.abs() > 1e-6, 1 / gate, 0.0).unsqueeze(1)


def _typical_moments(state: dict[str, Any], gate: Tensor) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == gate.shape:
            value.fill_(value.mean() if key in _SQUARES | _SIZES else float(key in _PARAMETERS))


def plain_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The state of ``parameter``: a decoded copy where it is quantised, else the very one; empty if there is none.

    Changes in it take effect by :func:`set_plain_state`. Accelerate's wrapper is looked through.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if isinstance(optimizer, CoatAdamW):
        return optimizer.plain_state(parameter)
    return optimizer.state.get(parameter, {})


def set_plain_state(optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Any]) -> None:
    """Make ``state`` that of ``parameter``; no other state is touched."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if isinstance(optimizer, CoatAdamW) and state:
        optimizer.set_plain_state(parameter, state)
    elif state:
        optimizer.state[parameter] = state
