"""Which ranks go when a model must not exceed a budget: the least important ones, and no more than needed."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_comera.compress.reports import size_report
from hf_comera.compress.trimming import LayerRanks, smallest_size, trim
from hf_comera.modules import TTMEmbedding
from hf_comera.training.ranks.importance import BondTable
from hf_comera.training.ranks.settings import RankAdaptation

__all__ = [
    "check_budget",
    "choose_ranks",
    "core_budget",
    "core_parameters",
    "layer_ranks",
    "ungated_parameters",
    "warn_of_small_model",
]

logger = logging.getLogger(__name__)


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
