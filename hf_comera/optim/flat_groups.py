"""``FlatGroups``: tensors of different shapes as one matrix of groups, and back, for 8-bit optimizers."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_comera.ops.fp8 import GROUP_SIZE, to_groups

__all__ = ["FlatGroups", "Layout", "layout_of", "local_part"]

FEWEST = 8
"""Entries that are worth scales: 4 bytes an entry for both moments, where float32 takes 8."""

SCALE_BYTES = 16
"""Of a group: two numbers for each of two moments."""

DEAREST = 0.2
"""Bytes of scales an entry up to which rows are groups of their own."""

LARGEST_WHOLE = 2**18
"""Entries of a parameter that all processes may keep the state of."""

LONGEST_LOOP = 64
"""Entries that a vectorised loop takes at once, at most."""


class Layout(NamedTuple):
    """How a tensor is cut into groups: within rows, so that neither sharding nor cutting along axis 0 splits one."""

    num_rows: int
    length: int
    """Entries of a row."""
    size: int
    """Entries of a group; the last one of a row is filled up."""
    is_quantised: bool
    is_whole: bool = False
    """Whether the tensor is one row, which is not sharded."""

    @property
    def num_groups(self) -> int:
        """Of all rows."""
        return self.num_rows * -(-self.length // self.size)

    @property
    def num_lacking(self) -> int:
        """Entries that the last group of a row is filled up by."""
        return -self.length % self.size

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        """Of the scales: rows, groups of a row, and two."""
        return self.num_rows, -(-self.length // self.size), 2


@functools.cache
def layout_of(shape: torch.Size) -> Layout:
    """The layout of a parameter, by its shape alone.

    A row is what belongs to one index of axis 0. Where rows are short, or a little longer than a group, scales would
    take much; small tensors of such rows are cut into groups as a whole.
    """
    num_entries, length = shape.numel(), shape[1:].numel()
    num_rows = shape[0] if len(shape) else 1
    of_rows = Layout(num_rows, length, min(length, GROUP_SIZE), True)
    has_rows = len(shape) > 1 and length >= FEWEST
    if has_rows and SCALE_BYTES * of_rows.scales_shape[1] <= DEAREST * length:
        return of_rows
    if FEWEST <= num_entries <= LARGEST_WHOLE:
        return Layout(1, num_entries, GROUP_SIZE, True, is_whole=True)
    return of_rows if has_rows else Layout(num_entries, 1, 1, False)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class FlatGroups:
    """Some tensors that are processed as one.

    Args:
        layouts: Theirs, of one group size.

    Shape:
        A list of tensors -> ``(groups of all, size)``; rows are filled up with zeros. Groups of ones follow, so that
        no entry lies beyond the last full vector of a loop on a CPU, where functions round otherwise. The result of a
        group then does not depend on its neighbours.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = layouts
        num_groups = [layout.num_groups for layout in layouts]
        self._num_groups = [*num_groups, -sum(num_groups) % LONGEST_LOOP]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """New memory, also of a single tensor."""
        parts, size = [], self.layouts[0].size
        zeros = tensors[0].new_zeros(size)
        for tensor, layout in zip(tensors, self.layouts, strict=True):
            if layout.num_rows > 1 and layout.num_lacking:
                parts.append(to_groups(tensor.reshape(layout.num_rows, layout.length), size).flatten())
            else:
                parts += [tensor.reshape(-1), zeros[: layout.num_lacking]]
        return torch.cat([*parts, self._ones(tensors[0], size)]).view(-1, size)

    def scatter(self, groups: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write groups into the tensors that they are of, rounded to their dtype."""
        parts = []
        for part, layout, tensor in zip(groups.split(self._num_groups), self.layouts, tensors, strict=False):
            if layout.num_lacking:
                part = part.reshape(layout.num_rows, layout.length + layout.num_lacking)[:, : layout.length]
            parts.append(part.reshape(tensor.shape))
        torch._foreach_copy_(list(tensors), parts)

    def gather_scales(self, scales: Sequence[Tensor]) -> Tensor:
        """``(groups of all, 2)``."""
        return self._joined([scale.flatten(0, 1) for scale in scales])

    def scatter_scales(self, groups: Tensor, scales: Sequence[Tensor]) -> None:
        """Write ``(groups of all, 2)`` where it is from."""
        parts = zip(groups.split(self._num_groups), scales, strict=False)
        torch._foreach_copy_(list(scales), [part.view_as(scale) for part, scale in parts])

    def spread(self, numbers: Sequence[Tensor]) -> Tensor:
        """One number for each tensor, as ``(groups of all, 1)``."""
        parts = zip(numbers, self._num_groups, strict=False)
        return self._joined([number.expand(count, 1) for number, count in parts])

    def _joined(self, groups: list[Tensor]) -> Tensor:
        width = groups[0].shape[1]
        return torch.cat([*groups, self._ones(groups[0], width).view(-1, width)])

    def _ones(self, like: Tensor, width: int) -> Tensor:
        """The groups that follow: neither a moment nor a divisor that is special."""
        return like.new_ones(self._num_groups[-1] * width)
