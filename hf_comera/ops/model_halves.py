"""Halves of all sides of a model: in stacked products, or by operators with CUDA kernels, for all sides at once.

The operators ``hf_comera::tt_halves`` and ``hf_comera::tt_halves_backward`` take sides of any factors and ranks
together; their bodies in plain torch are the reference. Both read the cores where they lie, so these must not change
in between, as in ``torch.nn.functional.linear``. Where no kernels serve the device, stacked products keep copies
instead, with which backward multiplies less.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Any

import torch
from torch import Tensor

from hf_comera.ops.cuda.dispatch import kernels_serve, register_cuda_kernel
from hf_comera.ops.cuda.halves import Half, tt_halves, tt_halves_backward
from hf_comera.ops.halves import (
    Side,
    differentiable_gradients,
    multiply_stacked,
    padded_rank,
    stacked_gradients,
    stacked_halves,
)

__all__ = ["model_halves"]


def model_halves(sides: Sequence[Side]) -> list[list[Tensor]]:
    """The halves of every layer of every side, as :func:`hf_comera.ops.halves.stacked_halves` gives those of one.

    Returns:
        For each side L tensors ``(R, features)`` in its dtype, R for each layer.

    Source:
        CoMERA, arXiv:2405.14377, for the halves; all in one launch is ours.
    """
    found: dict[int, list[Tensor]] = {}
    launches: dict[Any, list[int]] = {}
    for index, side in enumerate(sides):
        if kernels_serve(side.cores[0][0].device):
            launches.setdefault(_launch_key(side), []).append(index)
        else:
            found[index] = stacked_halves(side)
    for launch in launches.values():
        together = [sides[index] for index in launch]
        halves = iter(_LaunchedHalves.apply(together, *chain.from_iterable(side.tensors() for side in together)))
        found |= {index: list(islice(halves, len(sides[index].cores))) for index in launch}
    return [found[index] for index in range(len(sides))]


def _launch_key(side: Side) -> Any:
    """Equal for sides that one launch can take, and that all have a gradient or none."""
    core = side.cores[0][0]
    return core.dtype, core.device, side.dtype, any(tensor.requires_grad for tensor in side.tensors())


class _LaunchedHalves(torch.autograd.Function):
    """Holds the memory that the cores had in forward, and no more; a backward pass can be made any number of times."""

    @staticmethod
    def forward(ctx: Any, sides: list[Side], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sides, ctx.halves = sides, [half for side in sides for half in _halves_of(side)]
        ctx.versions = [_versions(half) for half in ctx.halves]
        return tuple(_tt_halves(*_flat(ctx.halves), sides[0].dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        for side in ctx.sides:
            side.has_met_backward = True
        layers = [(side, index) for side in ctx.sides for index in range(len(side.cores))]
        used = {place: grad for place, grad in enumerate(grads) if grad is not None}
        for place in used:
            _check_unchanged(ctx.halves[place], ctx.versions[place])
        found: dict[int, list[Any]]
        if torch.is_grad_enabled():
            found = {place: differentiable_gradients(*layers[place], grad) for place, grad in used.items()}
        else:
            halves = [ctx.halves[place] for place in used]
            all_grads = iter(_tt_halves_backward(list(used.values()), *_flat(halves)))
            found = {
                place: list(islice(all_grads, half.num_tensors)) for place, half in zip(used, halves, strict=True)
            }
        none = ([None] * half.num_tensors for half in ctx.halves)
        return (None, *chain.from_iterable(found.get(place, missing) for place, missing in enumerate(none)))


@torch.library.custom_op("hf_comera::tt_halves", mutates_args=())
def _tt_halves(tensors: list[Tensor], layout: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Halves from cores and gates that :func:`_flat` has flattened."""
    sides = _stackable(_halves(tensors, layout), dtype)
    return [half.clone() for side in sides for half in multiply_stacked(side)[0]]


@_tt_halves.register_fake
def _(tensors: list[Tensor], layout: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [tensors[0].new_empty(half.rank, half.features, dtype=dtype) for half in _halves(tensors, layout)]


@torch.library.custom_op("hf_comera::tt_halves_backward", mutates_args=())
def _tt_halves_backward(grads: list[Tensor], tensors: list[Tensor], layout: list[int]) -> list[Tensor]:
    """Gradients of all ``tensors``."""
    rest, found = iter(grads), []
    for side in _stackable(_halves(tensors, layout), grads[0].dtype):
        everyone = range(len(side.cores))
        of_side = [next(rest) for _ in everyone]
        found += stacked_gradients(side, multiply_stacked(side)[1], everyone, of_side)
    return [grad.clone() for of_half in found for grad in of_half]


@_tt_halves_backward.register_fake
def _(grads: list[Tensor], tensors: list[Tensor], layout: list[int]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _tt_halves_by_kernel(tensors: list[Tensor], layout: list[int], dtype: torch.dtype) -> list[Tensor]:
    return tt_halves(_halves(tensors, layout), dtype)


def _gradients_by_kernel(grads: list[Tensor], tensors: list[Tensor], layout: list[int]) -> list[Tensor]:
    return list(chain.from_iterable(tt_halves_backward(_halves(tensors, layout), grads)))


register_cuda_kernel(_tt_halves, _tt_halves_by_kernel)
register_cuda_kernel(_tt_halves_backward, _gradients_by_kernel)


def _halves_of(side: Side) -> list[Half]:
    """What the operators take of ``side``; copies of cores that are not contiguous."""
    return [
        Half(_contiguous(cores), side.on_left, side.features, rank, _contiguous(gates))
        for cores, gates, rank in zip(side.cores, side.gates, side.ranks(), strict=True)
    ]


def _contiguous(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().contiguous() for tensor in tensors]


def _flat(halves: Sequence[Half]) -> tuple[list[Tensor], list[int]]:
    """Cores and gates of one half after the other, and four numbers for each half."""
    tensors = [tensor for half in halves for tensor in (*half.cores, *half.gates)]
    layout = [(len(half.cores), len(half.gates), int(half.is_left), half.features) for half in halves]
    return tensors, list(chain.from_iterable(layout))


def _halves(tensors: Sequence[Tensor], layout: Sequence[int]) -> list[Half]:
    """What :func:`_flat` was given."""
    rest, halves = iter(tensors), []
    numbers = iter(layout)
    for num_cores, num_gates, is_left, features in zip(numbers, numbers, numbers, numbers, strict=True):
        cores, gates = list(islice(rest, num_cores)), list(islice(rest, num_gates))
        rank = padded_rank(cores[-1].shape[2] if is_left else cores[0].shape[0])
        halves.append(Half(cores, bool(is_left), features, rank, gates))
    return halves


def _stackable(halves: Sequence[Half], dtype: torch.dtype) -> Iterator[Side]:
    """Neighbours that can be stacked, together."""

    def family(half: Half) -> tuple[Any, ...]:
        return half.is_left, half.features, [core.shape[1] for core in half.cores], len(half.gates)

    for (on_left, features, *_), group in groupby(halves, family):
        alike = list(group)
        yield Side(
            [list(half.cores) for half in alike], [list(half.gates) for half in alike], on_left, features, dtype
        )


def _versions(half: Half) -> list[int]:
    """Of all cores and gates; copies made in inference mode have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in (*half.cores, *half.gates)]


def _check_unchanged(half: Half, before: Sequence[int]) -> None:
    """Refuse gradients at cores that are no longer those of the forward pass."""
    for tensor, found, expected in zip((*half.cores, *half.gates), _versions(half), before, strict=True):
        if found != expected:
            raise RuntimeError(
                f"A core or rank gate of shape {tuple(tensor.shape)} was modified in place between the forward pass "
                f"and backward: it is at version {found}, expected version {expected}. Call backward before the "
                "optimizer's step, or make the forward pass anew."
            )
