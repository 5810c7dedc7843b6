"""Which parameters ``CoatAdamW`` steps together."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_comera.optim.flat_groups import Layout

__all__ = ["Piece", "alike", "batches", "entries_at_once"]


class Piece(NamedTuple):
    """A run of rows of a parameter, its gradient and its state, by their names, as far as this process holds them."""

    layout: Layout
    tensors: dict[str, Tensor]


def alike(pieces: Iterable[Piece]) -> Iterable[list[Piece]]:
    """Those that one call of an operator takes: of equal dtypes and device, with moments of one kind."""
    found: dict[Any, list[Piece]] = {}
    for piece in pieces:
        value = piece.tensors["value"]
        kind = (value.dtype, value.device, value.is_contiguous(), piece.tensors["gradient"].dtype)
        found.setdefault((*kind, *piece.tensors), []).append(piece)
    return found.values()


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Runs of rows that are stepped together: of equal dtypes, device and group size, and not too many at once."""
    begun: dict[Any, tuple[list[Piece], int]] = {}
    for piece in chain.from_iterable(map(_cut, pieces)):
        value, layout = piece.tensors["value"], piece.layout
        key = (value.dtype, value.device, piece.tensors["gradient"].dtype, layout.size, layout.is_quantised)
        batch, num_entries = begun.pop(key, ([], 0))
        num_new = layout.num_groups * layout.size
        if batch and num_entries + num_new > entries_at_once(value.device):
            yield batch
            batch, num_entries = [], 0
        begun[key] = ([*batch, piece], num_entries + num_new)
    yield from (batch for batch, _ in begun.values())


def entries_at_once(device: torch.device) -> int:
    """How many entries are processed together: as few as the cost of calls allows, on a CPU as caches hold."""
    return 2**18 if device.type == "cpu" else 2**22


def _cut(piece: Piece) -> Iterator[Piece]:
    """One parameter in runs of rows of a bounded number of entries; what is not quantised as a whole."""
    layout, tensors = piece
    num_rows = max(entries_at_once(tensors["value"].device) // max(layout.length, 1), 1)
    if not layout.is_quantised or layout.num_rows <= num_rows:
        if layout.num_rows:
            yield piece
        return
    for start in range(0, layout.num_rows, num_rows):
        part = layout._replace(num_rows=min(num_rows, layout.num_rows - start))
        rows = {key: value.narrow(0, start, part.num_rows) for key, value in tensors.items() if key != "step"}
        yield Piece(part, {"step": tensors["step"], **rows})
