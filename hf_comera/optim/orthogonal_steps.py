"""From the momenta of a family to steps in which no direction of an implied matrix is longer than another."""

import torch
from torch import Tensor

from hf_comera.optim.families import Family
from hf_comera.optim.orthogonalize import orthogonalize
from hf_comera.tt.tangent import interface_factors, remove_gauge, to_core, to_orthogonal_gauge

__all__ = ["orthogonal_steps"]


def orthogonal_steps(family: Family, cores: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
    """Steps of the cores that move, each of about one in the orthogonal gauge; not yet divided among them.

    What a neighbour towards the centre can do as well is left to it, if it has a gradient.

    Args:
        family: What the shapes decide.
        cores: All cores, stacked and padded.
        momenta: Of the places with a gradient.

    Shape:
        ``(trains, r_{k-1}, n_k, r_k)`` -> the same for each moving place; padding is zero.
    """
    befores, behinds = interface_factors(cores, family.live)
    momentum_of = dict(zip(family.places, momenta, strict=True))
    steps = []
    for place in family.moving:
        on_left = place < family.num_left
        before, behind = befores[place], behinds[place]
        step = to_orthogonal_gauge(momentum_of[place], before, behind)
        shared, still = family.shared[place], family.still[place]
        if shared is not False:
            outer, live = (before, family.live[place + 1]) if on_left else (behind, family.live[place])
            freed = remove_gauge(step, cores[place], outer, on_left=on_left, live=live)
            step = freed if shared is True else torch.where(shared, freed, step)
        unfolding = step.flatten(-3, -2) if on_left else step.flatten(-2)
        step = to_core(orthogonalize(unfolding).view_as(step), before, behind)
        steps.append(step if still is False else step.masked_fill(still, 0.0))
    return steps
