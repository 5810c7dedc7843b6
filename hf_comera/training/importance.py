"""What every rank is worth: its part of the norm of its layer, times how much the loss depends on that layer."""

import torch
from torch import Tensor

from hf_comera.training.bond_table import BondTable

__all__ = ["bond_effects", "rank_importance"]


def bond_effects(table: BondTable, gates: Tensor, gradients: Tensor) -> Tensor:
    """How much one step's loss depends on each bond: the sum of ``(d * dL/dd)^2`` over its gates d.

    ``d * dL/dd`` is the change of the loss, to first order, if that rank were left out. Its mean square over many
    steps is what the loss rises by, to second order, where gradients are noise (Fisher's information in place of the
    Hessian). It costs nothing: gates have their gradients anyway.

    Shape:
        gates and gradients ``(G,)`` -> ``(B,)`` in float64; gradients that are not finite count as zero.

    Source:
        Molchanov et al., "Importance estimation for neural network pruning", arXiv:1906.10771.
    """
    effects = (gates * gradients).square().nan_to_num(0.0, 0.0, 0.0)
    return table.norms(effects)[:-1]


def rank_importance(table: BondTable, effects: Tensor, spectra: list[Tensor], threshold: float) -> Tensor:
    """Importance of every rank, in units that are the same for all layers.

    The bonds must be in their canonical bases. There the ranks of a bond are orthogonal, so rank j is the part
    ``s_j^2 / |s|^2`` of the squared norm of its layer's matrix; of what the loss depends on the layer (the mean of the
    effects of its bonds), it has the same part.

    Args:
        table: Of the model.
        effects: Mean of :func:`bond_effects` over the last steps, ``(B,)``.
        spectra: Singular values of each bond, descending.
        threshold: A rank is dead if it and all weaker ones together, by the norm of their singular values, are no
            more than this part of the largest: what a cut changes at a bond is bounded, however many ranks die.

    Returns:
        ``(G,)`` in float64, -1 for dead ranks.
    """
    effects = effects if effects.any() else torch.ones_like(effects)  # before the first step
    bonds = iter(range(len(spectra)))
    values = []
    for module in table.layers.values():
        own = [next(bonds) for _ in module.rank_gates()]
        effect = effects[own].mean()
        for bond in own:
            squares = spectra[bond].square()
            share = squares / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)
            tails = squares.flip(0).cumsum(0).flip(0).sqrt()
            dead = tails <= threshold * spectra[bond][0]
            values.append(torch.where(dead, -1.0, share * effect))
    return torch.cat(values)
