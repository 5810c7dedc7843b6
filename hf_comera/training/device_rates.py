"""``DeviceRates``: learning rates in tensors on the device, which recorded optimizer steps read at each replay."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_comera.optim import CoatAdamW, TTMuon

__all__ = ["DeviceRates", "why_not_captured"]

OURS = (TTMuon, CoatAdamW)
"""Their steps read nothing on the host, and keep their state where it is."""


class DeviceRates:
    """One scalar tensor for each group of an optimizer; schedulers and checkpoints go on seeing the floats.

    Args:
        optimizer: One that :func:`why_not_captured` has nothing against.
        device: Of its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        exact = isinstance(optimizer, OURS) or device.type == "cpu"  # kernels of torch's optimizers read float32
        dtype = torch.float64 if exact else torch.float32
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]
        self._values: list[float | None] = [None] * len(self._rates)

    def update(self) -> None:
        """Copy the rates of the groups to the device, where a scheduler has changed them."""
        for index, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self._rates[index].copy_(rate)
            elif (value := float(rate)) != self._values[index]:
                self._rates[index].fill_(value)
                self._values[index] = value

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the tensors into the groups, and the optimizer into a mode in which torch lets it be recorded."""
        groups = self._optimizer.param_groups
        before: list[dict[str, Any]] = [
            {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
        ]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True  # fused ones are, but torch asks
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def why_not_captured(optimizer: torch.optim.Optimizer) -> str | None:
    """Why steps of ``optimizer`` cannot be recorded; None if they can."""
    if isinstance(optimizer, OURS):
        return None
    if all(group.get("capturable") or group.get("fused") for group in optimizer.param_groups):
        return None
    return (
        f"{type(optimizer).__name__} keeps its rates or step counts on the host; use TTMuon, CoatAdamW, or an "
        "optimizer of torch made with capturable=True or fused=True"
    )
