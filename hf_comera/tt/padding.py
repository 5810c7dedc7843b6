"""``RaggedStacks``: tensors of different shapes, zero-padded to a few stacked ones and cut out again.

Both ways cost the same few operations however many tensors there are: one concatenation, and one selection by an index
that depends on the shapes alone. Keep the object as long as the shapes stay; an entry costs up to eight bytes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["RaggedStacks"]


class RaggedStacks:
    """How lists of tensors become stacked ones, and back; differentiable, nothing is read from the device.

    A stack is as large on every axis as the largest of its tensors, which begin at its origin; the rest is zero. Where
    no tensor is smaller than its stack, nothing is padded and no index is kept.

    Args:
        shapes: For each stack the shapes of its tensors; equally many axes within a stack.
        device: Of the tensors.
        padded: For each stack the shape that its tensors are padded to, where that is larger than the largest.

    Shape:
        A list of T tensors of any sizes ``(r, ..., s)`` -> ``(T, largest r, ..., largest s)``.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[Sequence[int]]],
        device: torch.device | str = "cpu",
        padded: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.shapes = [[tuple(shape) for shape in of_stack] for of_stack in shapes]
        wanted = padded or [[0] * len(of_stack[0]) for of_stack in self.shapes]
        self.padded = [
            (len(of_stack), *(max(sizes) for sizes in zip(least, *of_stack, strict=True)))
            for least, of_stack in zip(wanted, self.shapes, strict=True)
        ]
        self.is_padded = any(
            shape != size[1:] for size, of_stack in zip(self.padded, self.shapes, strict=True) for shape in of_stack
        )
        self._sizes = [math.prod(shape) for of_stack in self.shapes for shape in of_stack]
        self._padded_sizes = [math.prod(shape) for shape in self.padded]
        if self.is_padded:
            spread, cut = self._indices()
            self._spread, self._cut = spread.to(device), cut.to(device)

    def join(self, stacks: Sequence[Sequence[Tensor]]) -> Tensor:
        """All entries in one vector; those of several such lists can be combined before they are spread.

        Shape:
            Lists of tensors -> ``(entries of all,)``, and a zero behind them where there is padding.
        """
        flat = [tensor.reshape(-1) for tensors in stacks for tensor in tensors]
        return torch.cat([*flat, flat[0].new_zeros(1)] if self.is_padded else flat)

    def cut(self, joined: Tensor) -> list[Tensor]:
        """The entries of each tensor, in one row, of what :meth:`join` gave; no copies."""
        return list(joined.split([*self._sizes, 1] if self.is_padded else self._sizes))[: len(self._sizes)]

    def spread(self, joined: Tensor) -> list[Tensor]:
        """The stacked tensors of what :meth:`join` gave."""
        flat = joined.index_select(0, self._spread) if self.is_padded else joined
        return [part.view(shape) for part, shape in zip(flat.split(self._padded_sizes), self.padded, strict=True)]

    def pack(self, stacks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """One stacked tensor for each list of tensors."""
        return self.spread(self.join(stacks))

    def unpack(self, stacked: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all stacks, one stack after the other, without the padding.

        Args:
            stacked: As :meth:`pack` gives them; axes may have been merged or parted since.
        """
        shapes = [shape for of_stack in self.shapes for shape in of_stack]
        flat = torch.cat([tensor.reshape(-1) for tensor in stacked])
        flat = flat.index_select(0, self._cut) if self.is_padded else flat
        return [part.view(shape) for part, shape in zip(flat.split(self._sizes), shapes, strict=True)]

    def _indices(self) -> tuple[Tensor, Tensor]:
        """Where each padded entry is among the joined ones, and where each joined one is among the padded."""
        total, start, parts = sum(self._sizes), 0, []
        sizes = iter(self._sizes)
        for padded, of_stack in zip(self.padded, self.shapes, strict=True):
            places = torch.full(padded, total, dtype=torch.int32, device="cpu")
            for row, shape in zip(places, of_stack, strict=True):
                stop = start + next(sizes)
                entries = torch.arange(start, stop, dtype=torch.int32, device="cpu").view(shape)
                row[tuple(slice(size) for size in shape)] = entries
                start = stop
            parts.append(places.flatten())
        spread = torch.cat(parts)
        kept = (spread < total).nonzero().flatten()
        cut = torch.empty(total, dtype=torch.int32, device="cpu")
        cut[spread[kept].long()] = kept.int()
        return spread, cut
