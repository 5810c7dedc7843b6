"""Which ranks go where a size must not be exceeded: the least important ones, and no more than needed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["LayerRanks", "smallest_size", "trim"]

_WHOLE = -1
"""In place of a bond: all of a train, at rank one."""


@dataclass
class LayerRanks:
    """One train: its factors, the importance of every rank of every bond, and the ranks that must stay."""

    factors: Sequence[int]
    """Middle axes of the cores, multiplied; one more than bonds."""
    importance: Sequence[np.ndarray]
    """Per bond, one number per rank."""
    floor: int = 0
    """Ranks that stay on every bond; with 0 the whole train may go."""

    def live_size(self) -> int:
        """Entries of all cores without the ranks of negative importance, the floor kept."""
        ranks = [max(int((values >= 0).sum()), min(self.floor, len(values))) for values in self.importance]
        return self.size(ranks) if all(ranks) else 0

    def size(self, ranks: Sequence[int]) -> int:
        """Entries of all cores at these ranks."""
        bonds = (1, *ranks, 1)
        return sum(factor * bonds[k] * bonds[k + 1] for k, factor in enumerate(self.factors))


class _Trimmed:
    """One train while ranks go: how many are left on each bond, and what the next one costs and is worth."""

    def __init__(self, layer: LayerRanks) -> None:
        self.layer = layer
        self.orders = [np.argsort(-values, kind="stable") for values in layer.importance]  # most important first
        self.ranks = [len(values) for values in layer.importance]

    @property
    def size(self) -> int:
        return self.layer.size(self.ranks)

    def saving(self, bond: int) -> int:
        """Parameters that go with the least important rank of ``bond``; the whole train with its last one."""
        if self.ranks[bond] == 1:
            return self.size
        return self.cost(bond)

    def cost(self, bond: int) -> int:
        """Parameters of one rank of ``bond``; of a train with one rank everywhere for ``_WHOLE``."""
        if bond == _WHOLE:
            return self.layer.size([1] * len(self.ranks))
        bonds = (1, *self.ranks, 1)
        return self.layer.factors[bond] * bonds[bond] + self.layer.factors[bond + 1] * bonds[bond + 2]

    def loss_per_parameter(self, bond: int) -> float:
        """Importance of the least important rank of ``bond``, over what it saves; infinite where none may go."""
        if self.ranks[bond] <= self.layer.floor:
            return float("inf")
        least = self.layer.importance[bond][self.orders[bond][self.ranks[bond] - 1]]
        return float(least) / self.saving(bond)

    def remove(self, bond: int) -> list[int]:
        """Take the least important rank of ``bond`` away, and with its last one the train; the bonds of what went.

        Of a train that goes, these are its ranks above one, the least important first, and then ``_WHOLE``.
        """
        if self.ranks[bond] > 1:
            self.ranks[bond] -= 1
            return [bond]
        others = [(place, rank) for place, count in enumerate(self.ranks) for rank in range(1, count)]
        others.sort(key=lambda other: self.layer.importance[other[0]][self.orders[other[0]][other[1]]])
        self.ranks = [0] * len(self.ranks)
        return [*(place for place, _ in others), _WHOLE]

    def restore(self, bond: int) -> None:
        """Undo what is last in :meth:`remove`."""
        if bond == _WHOLE:
            self.ranks = [1] * len(self.ranks)
        else:
            self.ranks[bond] += 1

    def lacks(self, bond: int) -> bool:
        """Whether a rank of ``bond`` could come back: of a train that is there, or the train itself."""
        return any(self.ranks) == (bond != _WHOLE)

    def kept(self) -> list[np.ndarray]:
        """Indices of the ranks that stay, in their order, for each bond."""
        return [np.sort(order[:rank]) for order, rank in zip(self.orders, self.ranks, strict=True)]


def trim(layers: Sequence[LayerRanks], budget: int) -> list[list[np.ndarray]]:
    """Remove ranks one at a time, the one of the least importance per parameter first, until ``budget`` is met.

    If the last removal saved more than needed, ranks that fit are given back. At the end no removed rank fits any
    more, nor a removed tensor train with one rank everywhere, so the size is within one of these of the budget.

    Args:
        layers: The trains with the importance of their ranks.
        budget: Largest number of entries of all cores together.

    Returns:
        For each train and bond the indices of the ranks to keep; of a removed train none on any bond.

    Raises:
        ValueError: If the budget is below :func:`smallest_size`.
    """
    smallest = smallest_size(layers)
    if budget < smallest:
        raise ValueError(
            f"A budget of {budget:,} core parameters cannot be met: the smallest possible is {smallest:,}."
        )
    states = [_Trimmed(layer) for layer in layers]
    size = sum(state.size for state in states)
    scores = [[state.loss_per_parameter(bond) for bond in range(len(state.ranks))] for state in states]
    best = np.array([min(row, default=np.inf) for row in scores])
    removed: list[tuple[int, int]] = []
    while size > budget:
        index = int(best.argmin())
        state, bond = states[index], int(np.argmin(scores[index]))
        size -= state.saving(bond)
        removed += [(index, gone) for gone in state.remove(bond)]
        scores[index] = [state.loss_per_parameter(bond) for bond in range(len(state.ranks))]
        best[index] = min(scores[index], default=np.inf)
    _give_back(states, removed, budget - size)
    return [state.kept() for state in states]


def smallest_size(layers: Sequence[LayerRanks]) -> int:
    """Core parameters with every bond at its floor."""
    return sum(
        layer.size([min(layer.floor, len(values)) for values in layer.importance]) if layer.floor else _fixed(layer)
        for layer in layers
    )


def _fixed(layer: LayerRanks) -> int:
    """A train without bonds has nothing to trim."""
    return 0 if layer.importance else layer.size([])


def _give_back(states: list[_Trimmed], removed: list[tuple[int, int]], slack: int) -> None:
    """Restore what was removed while it fits, the last removed first."""
    fits = True
    while fits:
        fits = False
        for place in range(len(removed) - 1, -1, -1):
            index, bond = removed[place]
            state = states[index]
            if state.lacks(bond) and state.cost(bond) <= slack:
                slack -= state.cost(bond)
                state.restore(bond)
                del removed[place]
                fits = True
