"""``Family``: trains of equal factors and any ranks that are stepped together, and what their shapes decide."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_comera.tt.ragged import RaggedStacks

__all__ = ["Family", "Train", "families"]

WORTH_A_FAMILY = 2**16
"""Entries of padding that have to be saved for trains to be stepped apart.

Padding costs arithmetic, a family of its own costs launches. On a CPU both are about even here (docs/decisions.md).
"""

Shape = tuple[int, int, int]
"""Of a core: left rank, factor, right rank."""


class Train(NamedTuple):
    """The cores of one layer; the first ``num_left`` have the middle bond on their right."""

    cores: list[nn.Parameter]
    num_left: int
    entries: int
    """Of the implied matrix."""

    def shapes(self) -> tuple[Shape, ...]:
        """Those of the cores, the row and column factor of a TTM core as one."""
        return tuple((core.shape[0], core.shape[1:-1].numel(), core.shape[-1]) for core in self.cores)

    def key(self) -> tuple[Any, ...]:
        """Equal for trains that can be stepped together."""
        factors = tuple(core.shape[1:-1] for core in self.cores)
        has_gradient = tuple(core.grad is not None for core in self.cores)
        return factors, has_gradient, self.num_left, self.entries, self.cores[0].dtype, self.cores[0].device


class Family:
    """What the shapes of trains with equal keys decide about their steps, valid as long as the shapes stay.

    A decision that is the same for all trains is a plain bool, one that is not a mask ``(trains, 1, 1, 1)``.

    Args:
        trains: With equal keys. They are not kept.
    """

    places: list[int]
    """Of the cores with a gradient."""
    moving: list[int]
    """Of those that have a step in any train."""
    shared: dict[int, bool | Tensor]
    """For each place with a gradient: whether the neighbour towards the centre is asked first."""
    still: dict[int, bool | Tensor]
    """For each place with a gradient: whether that neighbour leaves nothing to it."""
    part: Tensor
    """What each of m moving cores has of the step of the matrix, ``1 / sqrt(m)``: ``(trains, 1, 1, 1)``."""
    live: list[Tensor | None]
    """For each bond, outer ones too, which ranks are no padding: ``(trains, largest rank)``; None for all."""

    def __init__(self, trains: Sequence[Train]) -> None:
        first, shapes = trains[0], [train.shapes() for train in trains]
        self.num_left, self._device = first.num_left, first.cores[0].device
        self.places = [place for place, core in enumerate(first.cores) if core.grad is not None]
        shared = {place: [self._is_shared(train, place) for train in shapes] for place in self.places}
        still = {
            place: [
                is_shared and only_mixes_ranks(train[place], place < self.num_left)
                for is_shared, train in zip(shared[place], shapes, strict=True)
            ]
            for place in self.places
        }
        self.shared = {place: self._decision(values) for place, values in shared.items()}
        self.still = {place: self._decision(values) for place, values in still.items()}
        self.moving = [place for place in self.places if not all(still[place])]
        numbers = [values.count(False) for values in zip(*still.values(), strict=True)]
        exact = torch.promote_types(first.cores[0].dtype, torch.float32)
        self.part = self._tensor([1 / math.sqrt(number) for number in numbers], exact).view(-1, 1, 1, 1)
        ranks = [[1] * len(trains), *([shape[2] for shape in cores] for cores in zip(*shapes, strict=True))]
        self.live = [self._live(of_bond) for of_bond in ranks]
        selections = (tuple(range(len(first.cores))), tuple(self.places), tuple(self.moving))
        stacks = {places: self._stacks(shapes, places) for places in dict.fromkeys(selections)}
        self.all_cores, self.cores_with_gradient, self.moving_cores = (stacks[places] for places in selections)

    def _is_shared(self, shapes: Sequence[Shape], place: int) -> bool:
        centre = self.num_left - 1 if left_is_larger(shapes, self.num_left) else self.num_left
        inner = place + 1 if place < self.num_left else place - 1
        return place != centre and inner in self.places

    def _decision(self, values: list[bool]) -> bool | Tensor:
        return values[0] if len(set(values)) == 1 else self._tensor(values).view(-1, 1, 1, 1)

    def _live(self, ranks: list[int]) -> Tensor | None:
        return None if len(set(ranks)) == 1 else self._tensor([[j < r for j in range(max(ranks))] for r in ranks])

    def _tensor(self, values: list[Any], dtype: torch.dtype = torch.bool) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu").to(self._device)

    def _stacks(self, shapes: Sequence[tuple[Shape, ...]], places: Sequence[int]) -> RaggedStacks:
        return RaggedStacks([[train[place] for train in shapes] for place in places], self._device)


def families(trains: Sequence[Train]) -> list[tuple[list[int], Family]]:
    """Which of some trains with equal keys are stepped together: their indices, and the family that they are."""
    shapes = [train.shapes() for train in trains]
    by_size = sorted(range(len(trains)), key=lambda index: sum(map(math.prod, shapes[index])))
    return [(members, Family([trains[index] for index in members])) for members in _parted(by_size, shapes)]


def _parted(members: list[int], shapes: Sequence[tuple[Shape, ...]]) -> list[list[int]]:
    """Small trains apart from large ones, wherever that is worth it."""

    def cost(part: list[int]) -> int:
        places = zip(*(shapes[index] for index in part), strict=True)
        largest = ([max(sizes) for sizes in zip(*of_place, strict=True)] for of_place in places)
        return len(part) * sum(map(math.prod, largest))

    costs = {cut: cost(members[:cut]) + cost(members[cut:]) for cut in range(1, len(members))}
    best = min(costs, key=costs.__getitem__, default=0)
    if not best or cost(members) - costs[best] <= WORTH_A_FAMILY:
        return [sorted(members)]
    return _parted(members[:best], shapes) + _parted(members[best:], shapes)


def left_is_larger(shapes: Sequence[Shape], num_left: int) -> bool:
    """Of the two cores at the middle bond; at full rank the larger one can do all that the other can."""
    if 0 < num_left < len(shapes):
        return math.prod(shapes[num_left - 1]) > math.prod(shapes[num_left])
    return num_left > 0


def only_mixes_ranks(shape: Shape, on_left: bool) -> bool:
    """Whether the neighbour towards the centre can do all that this core can: its unfolding is square."""
    rank_before, factor, rank_behind = shape
    return rank_before * factor <= rank_behind if on_left else factor * rank_behind <= rank_before
