"""Whether a saved state of rank adaptation is one that a training can go on from."""

import logging
from collections.abc import Set as AbstractSet
from typing import Any

from hf_comera.training.bond_table import BondTable
from hf_comera.training.rank_adaptation import RankAdaptation

__all__ = ["check_ranks_of_state", "check_state"]

logger = logging.getLogger(__name__)


def check_state(state: dict[str, Any], keys: AbstractSet[str], settings: RankAdaptation, total_steps: int) -> None:
    """Refuse what is no state of rank adaptation, or one of a training of another length.

    Other settings are taken, for a target may have turned out too small; a warning names them.

    Args:
        state: To be loaded.
        keys: That a state has.
        settings: Those of the training that is to go on.
        total_steps: Of that training.

    Raises:
        ValueError: If the state cannot be gone on from.
    """
    if lacking := keys - state.keys() - {"settings"}:
        raise ValueError(
            f"The state of rank adaptation lacks {sorted(lacking)}: it is damaged or of something else. Load what "
            "RankAdapter.state_dict() returned."
        )
    if state["total_steps"] != total_steps:
        raise ValueError(
            f"total_steps={total_steps}, but the training to resume was one of {state['total_steps']}, and its stages "
            "were laid out for them. Resume with as many steps, or start anew from its weights."
        )
    if "settings" not in state:
        logger.warning("The state of rank adaptation does not say its settings. Training goes on with %s.", settings)
    present, before = vars(settings), state.get("settings", {})
    if changed := [f"{name}={value!r}" for name, value in before.items() if present.get(name) != value]:
        logger.warning(
            "Rank adaptation goes on with other settings than it began with, which were %s.", ", ".join(changed)
        )


def check_ranks_of_state(state: dict[str, Any], table: BondTable) -> None:
    """Refuse a state of other ranks than those of the model.

    Raises:
        ValueError: If there are other bonds, or other ranks on them.
    """
    found = len(state["effects"]), len(state["strengths"])
    present = len(table.gates), table.num_gates
    if found != present:
        raise ValueError(
            f"The state of rank adaptation is of {found[0]} bonds with {found[1]} ranks in all, but the model has "
            f"{present[0]} with {present[1]}. Load the model of the same checkpoint first."
        )
