"""Put the bonds of layers into their canonical bases while they train: cores, gates, the state of the optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_comera.modules import TensorTrainModule
from hf_comera.tt.canonical import canonical_bases, to_basis

__all__ = ["to_canonical_basis"]


@torch.no_grad()
def to_canonical_basis(layers: Mapping[str, TensorTrainModule], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Change the basis of every bond to the canonical one; what the layers compute changes by rounding only.

    Gates are folded into the cores and start at one again. First moments of cores move as gradients do, exactly;
    second moments as if the entries of a gradient were independent. Moments of gates, whose ranks are new mixtures,
    become what is typical of their bond.

    Args:
        layers: Layers by name, with or without gates.
        optimizer: Theirs.

    Returns:
        The singular values of all bonds, layer by layer.
    """
    spectra: list[Tensor] = []
    for layer in layers.values():
        gates = layer.rank_gates()
        bases, inverses, singular_values = canonical_bases(layer.gated_cores())
        for place, core in enumerate(layer.cores()):
            before, behind = place - 1, place  # bonds
            first, last = place == 0, place == len(bases)
            gate = None if last or not gates else gates[behind].double()
            folded = core if gate is None else core.double() * gate
            moved = to_basis(folded, None if first else inverses[before], None if last else bases[behind])
            core.copy_(moved)
            back = None if last else inverses[behind].mT if gate is None else _reciprocal(gate) * inverses[behind].mT
            _move_moments(optimizer.state.get(core, {}), core, None if first else bases[before].mT, back)
        for gate in gates:
            gate.fill_(1)
            _typical_moments(optimizer.state.get(gate, {}), gate)
        spectra += singular_values
    return spectra


def _move_moments(state: dict[str, Any], core: Tensor, before: Tensor | None, behind: Tensor | None) -> None:
    """Gradients move by the transposed inverses: what the core is multiplied by, they are divided by."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == core.shape:
            squares = key.endswith("_sq")
            factors = [None if part is None else part.square() if squares else part for part in (before, behind)]
            value.copy_(to_basis(value, *factors))


def _reciprocal(gate: Tensor) -> Tensor:
    """``1 / gate`` as a column; 0 for a gate of zero, behind which there was no gradient."""
    return torch.where(gate.abs() > 1e-6, 1 / gate, 0.0).unsqueeze(1)


def _typical_moments(state: dict[str, Any], gate: Tensor) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == gate.shape:
            value.fill_(value.mean() if key.endswith("_sq") else 0)
