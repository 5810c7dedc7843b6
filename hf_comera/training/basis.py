"""Put the bonds of layers into their canonical bases while they train: cores, gates, the state of the optimizer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_comera.modules import TensorTrainModule
from hf_comera.training.plain_state import plain_state, set_plain_state
from hf_comera.tt.canonical import canonical_bases, to_basis
from hf_comera.tt.norms import finite_norms

__all__ = ["check_moments", "to_canonical_basis"]

_GRADIENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg", "prev"})
_SQUARES_OF_GRADIENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
_SIZES_OF_GRADIENTS = frozenset({"exp_inf"})
_SQUARES_OF_STEPS = frozenset({"acc_delta"})
_SIZES_OF_STEPS = frozenset({"step_size"})
_PARAMETERS = frozenset({"ax"})
_SQUARES, _SIZES = _SQUARES_OF_GRADIENTS | _SQUARES_OF_STEPS, _SIZES_OF_GRADIENTS | _SIZES_OF_STEPS
_KNOWN = _GRADIENTS | _SQUARES | _SIZES | _PARAMETERS
"""What torch's optimizers keep in the shape of a parameter, by what it is made of."""


@torch.no_grad()
def to_canonical_basis(layers: Mapping[str, TensorTrainModule], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Change the basis of every bond to the canonical one; what the layers compute changes by rounding only.

    Gates are folded into the cores and start at one again. First moments of cores move as gradients do, exactly, and
    those of RMSprop, which are steps, as the cores; squares and sizes as if the entries of a gradient, or of a step,
    were independent. Moments of gates, whose ranks are new mixtures, become what is typical of their bond.

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
        for parameter in layer.train_parameters():
            for key, value in plain_state(optimizer, parameter).items():
                moves = key in _KNOWN and value is not None
                if isinstance(value, Tensor) and value.numel() > 1 and (not moves or value.shape != parameter.shape):
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a core or gate "
                        f"of {name!r}, of shape {tuple(parameter.shape)}. How that changes with its ranks is not "
                        "known. Use TTMuon(model), or AdamW, Adam, SGD or another of torch's optimizers."
                    )


class _Change(NamedTuple):
    """What a core is multiplied by, on its bonds before and behind, and what a gradient of it is."""

    of_core: tuple[Tensor | None, Tensor | None]
    of_gradient: tuple[Tensor | None, Tensor | None]


def _changes(place: int, gate: Tensor | None, bases: list[Tensor], inverses: list[Tensor]) -> _Change:
    """Of the core at ``place``; what the core is multiplied by, its gradients are divided by."""
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
        factors = change.of_core if is_step else change.of_gradient
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
