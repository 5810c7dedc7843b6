"""Which ranks go when a model must not exceed a budget: the least important ones, and no more than needed."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_comera.compress.reports import size_report
from hf_comera.modules import TTMEmbedding
from hf_comera.training.ranks.importance import BondTable
from hf_comera.training.ranks.settings import RankAdaptation

__all__ = [
    "LayerRanks",
    "check_budget",
    "choose_ranks",
    "core_budget",
    "core_parameters",
    "layer_ranks",
    "smallest_size",
    "trim",
    "ungated_parameters",
    "warn_of_small_model",
]

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


def choose_ranks(
    table: BondTable, importance: Tensor, min_rank: int, budget: int | None = None, wanted: int = 0
) -> list[Tensor]:
    """Which ranks to keep: without a budget those that are not dead, with one the most important that fit in.

    With a budget, dead ranks go first, also where the budget has room for them. But they do not go where the wanted
    size would be missed by more than a rank.

    Args:
        table: Of the model.
        importance: Of every rank, ``(G,)``; negative if it is dead.
        min_rank: Ranks of a linear layer that the budget leaves on every bond.
        budget: Largest number of entries of all cores of the table now, or None.
        wanted: The number that it will be in the end.

    Returns:
        For each bond of the table the indices to keep, ascending, on the CPU; none on any bond of a removed layer.
    """
    if budget is None:
        live = [(part >= 0).nonzero().flatten().cpu() for part in table.split(importance)]
        return [index for layer in _by_layer(table, live) for index in _all_or_none(layer)]
    layers = layer_ranks(table, importance, min_rank)
    live_size = sum(layer.live_size() for layer in layers)
    kept = trim(layers, max(min(budget, live_size), wanted))
    return [torch.from_numpy(index) for layer in kept for index in layer]


def layer_ranks(table: BondTable, importance: Tensor, min_rank: int) -> list[LayerRanks]:
    """The layers of ``table`` as :func:`trim` wants them."""
    parts = _by_layer(table, [part.double().cpu().numpy() for part in table.split(importance)])
    return [
        LayerRanks(
            factors=[core.shape[1:-1].numel() for core in module.cores()],
            importance=values,
            floor=max(min_rank, 1) if isinstance(module, TTMEmbedding) else min_rank,
        )
        for module, values in zip(table.layers.values(), parts, strict=True)
    ]


def _by_layer(table: BondTable, of_bonds: Sequence[Any]) -> list[list[Any]]:
    """One item per bond, gathered per layer."""
    items = iter(of_bonds)
    return [[next(items) for _ in module.rank_gates()] for module in table.layers.values()]


def _all_or_none(live: list[Tensor]) -> list[Tensor]:
    """A layer with a bond without ranks keeps none on any."""
    return live if all(len(index) for index in live) else [index[:0] for index in live]


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


logger = logging.getLogger(__name__)


def core_budget(settings: RankAdaptation, model: nn.Module, adaptable: int) -> int | None:
    """Core parameters that the wanted size of the whole model leaves; None if no size is wanted.

    Gates are not counted: they are folded into the cores when training ends. The result may be negative.

    Args:
        settings: With the wanted size.
        model: The model as it is now.
        adaptable: Entries of the cores whose ranks can change.
    """
    if not settings.has_target:
        return None
    wanted = settings.target_parameters
    if settings.target_ratio is not None:
        wanted = int(settings.target_ratio * size_report(model).dense_parameters)
    assert wanted is not None
    return wanted - (ungated_parameters(model) - adaptable)


def core_parameters(table: BondTable) -> int:
    """Entries of all cores whose ranks can change."""
    return sum(module.num_core_parameters for module in table.layers.values())


def ungated_parameters(model: nn.Module) -> int:
    """Parameters of the whole model without the gates."""
    report = size_report(model)
    return report.parameters - report.gate_parameters


def check_budget(settings: RankAdaptation, model: nn.Module, table: BondTable, budget: int | None) -> None:
    """Refuse a size that cannot be reached.

    Raises:
        ValueError: If ``budget`` is too small; the message names the smallest possible size.
    """
    if budget is None:
        return
    smallest = smallest_size(layer_ranks(table, torch.zeros(table.num_gates), settings.min_rank))
    if budget >= smallest:
        return
    others = ungated_parameters(model) - core_parameters(table)
    name = "target_ratio" if settings.target_ratio is not None else "target_parameters"
    ratio = math.ceil(1e4 * (others + smallest) / size_report(model).dense_parameters) / 1e4
    as_ratio = f" (target_ratio={ratio})" if ratio <= 1 else ""
    raise ValueError(
        f"{name}={getattr(settings, name)} asks for {budget + others:,} parameters, but {others:,} are not in layers "
        f"whose ranks are trained, and with min_rank={settings.min_rank} the smallest possible size is "
        f"{others + smallest:,}. Use at least target_parameters={others + smallest}{as_ratio}, or compress "
        "more layers."
    )


def warn_of_small_model(model: nn.Module, table: BondTable, budget: int | None) -> None:
    """Say so when there is nothing to do."""
    cores = core_parameters(table)
    if budget is not None and budget >= cores:
        size = ungated_parameters(model)
        wanted = size - cores + budget
        logger.warning(
            "No rank will be pruned: %s parameters, no more than the wanted %s.", f"{size:,}", f"{wanted:,}"
        )
