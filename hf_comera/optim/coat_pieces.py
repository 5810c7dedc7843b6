"""Which parameters ``CoatAdamW`` steps together, and which ones a kernel takes."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_comera.ops.coat_kernels import QuantisedParameter, coat_adamw_refusal
from hf_comera.ops.kernel_switch import kernels_serve
from hf_comera.optim.coat_state import MOMENTS
from hf_comera.optim.flat_groups import Layout

__all__ = ["Piece", "batches", "entries_at_once", "split_for_kernel"]


class Piece(NamedTuple):
    """A run of rows of a parameter, its gradient and its state, by their names, as far as this process holds them."""

    layout: Layout
    tensors: dict[str, Tensor]


def split_for_kernel(pieces: Iterable[Piece]) -> tuple[list[QuantisedParameter], list[Piece]]:
    """What the kernel steps, if it is switched on, and all others."""
    taken, others = [], []
    for piece in pieces:
        parameter = _for_kernel(piece) if kernels_serve(piece.tensors["value"].device) else None
        if parameter is None or coat_adamw_refusal(parameter) is not None:
            others.append(piece)
        else:
            taken.append(parameter)
    return taken, others


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


def _for_kernel(piece: Piece) -> QuantisedParameter | None:
    layout, tensors = piece
    if not layout.is_quantised:
        return None
    moments = [tensors[key + suffix] for key in MOMENTS for suffix in ("", "_scales")]
    gradient = tensors["gradient"].contiguous()
    return QuantisedParameter(tensors["value"], gradient, *moments, tensors["step"], layout.num_rows, layout.length)


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
