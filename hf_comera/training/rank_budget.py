"""How many core parameters the wanted size of a model leaves, and whether that can be reached."""

import logging
import math

import torch
from torch import nn

from hf_comera.compress.size import size_report
from hf_comera.training.bond_table import BondTable
from hf_comera.training.rank_adaptation import RankAdaptation
from hf_comera.training.trimming import smallest_size, train_ranks

__all__ = ["check_budget", "core_budget", "core_parameters", "ungated_parameters", "warn_of_small_model"]

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
    smallest = smallest_size(train_ranks(table, torch.zeros(table.num_gates), settings.min_rank))
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
        logger.warning("No rank will be cut: %s parameters, no more than the wanted %s.", f"{size:,}", f"{wanted:,}")
