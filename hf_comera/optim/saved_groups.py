"""Take on the parameter groups of a saved state: by the names of the parameters, whatever the present norms are."""

from typing import Any

import torch

__all__ = ["take_saved_groups"]


def take_saved_groups(optimizer: torch.optim.Optimizer, saved_groups: list[dict[str, Any]]) -> None:
    """Put the parameters of ``optimizer`` into the groups of a saved state, if both have names.

    The groups of :func:`comera_param_groups` follow from the norms of the cores, which are others once a model has
    been trained: of a loaded model it makes other groups than those that the state was saved with.

    Raises:
        ValueError: If the names are those of other parameters; nothing is changed then.
    """
    own_groups = optimizer.param_groups
    if not all("names" in group for group in (*own_groups, *saved_groups)):
        return
    own = {name: p for group in own_groups for name, p in zip(group["names"], group["params"], strict=True)}
    saved = [name for group in saved_groups for name in group["names"]]
    if set(own) != set(saved):
        odd = min(set(own) ^ set(saved))
        where = "in the state, but not in the optimizer" if odd in saved else "in the optimizer, but not in the state"
        raise ValueError(
            f"The state is of another model: {odd!r} is {where}. Load the state of the same model, with the same "
            "layers compressed and frozen."
        )
    if [group["names"] for group in own_groups] == [group["names"] for group in saved_groups]:
        return
    own_groups[:] = [{**group, "params": [own[name] for name in group["names"]]} for group in saved_groups]
