"""Tensors of unequal shapes as one stacked tensor, padded with zeros, and back: a few operations for any number."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["stack_padded", "unstack_padded"]

Shapes = tuple[tuple[int, ...], ...]


def stack_padded(tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Stack tensors of one dtype and device, each in the first corner of ``shape``, with zeros around it.

    Shape:
        L tensors of at most ``shape`` -> ``(L, *shape)``.
    """
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    if len(set(shapes)) == 1:
        stacked = torch.stack(list(tensors))
        missing = [wanted - size for wanted, size in zip(shape, shapes[0], strict=True)]
        return pad(stacked, [part for size in reversed(missing) for part in (0, size)]) if any(missing) else stacked
    flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_zeros(1)])
    places, _ = _places(shapes, tuple(shape), str(flat.device))
    return flat.index_select(0, places).view(len(tensors), *shape)


def unstack_padded(stacked: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The corners of ``stacked`` that :func:`stack_padded` filled, each contiguous.

    Shape:
        ``(L, *shape)`` -> L tensors of ``shapes``.
    """
    wanted = tuple(tuple(shape) for shape in shapes)
    if len(set(wanted)) == 1:
        corner = _corner(stacked.unsqueeze(0), 0, (stacked.shape[0], *wanted[0]))
        return list(corner.contiguous().unbind())
    _, places = _places(wanted, tuple(stacked.shape[1:]), str(stacked.device))
    flat = stacked.reshape(-1).index_select(0, places)
    sizes = [math.prod(shape) for shape in wanted]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), wanted, strict=True)]


@lru_cache(maxsize=64)
def _places(shapes: Shapes, padded: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """Where each entry of the stack comes from (the last place is a zero), and where each true entry stands in it."""
    sizes = [math.prod(shape) for shape in shapes]
    total = sum(sizes)
    sources = torch.full((len(shapes), *padded), total, dtype=torch.int32)
    start = 0
    for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        corner = _corner(sources, index, shape)
        corner.copy_(torch.arange(start, start + size, dtype=torch.int32).view(shape))
        start += size
    sources = sources.view(-1)
    true_places = torch.empty(total + 1, dtype=torch.int32)
    true_places[sources] = torch.arange(sources.numel(), dtype=torch.int32)
    return sources.to(device), true_places[:total].to(device)


def _corner(stacked: Tensor, index: int, shape: Sequence[int]) -> Tensor:
    """The first corner, of ``shape``, of one entry of ``stacked``."""
    corner = stacked[index]
    for axis, size in enumerate(shape):
        corner = corner.narrow(axis, 0, size)
    return corner
