"""Halves of all sides of a model: by kernels all at once where they serve, else side by side in stacked products.

The kernels take sides of any factors and ranks together, and their gradients go back together. Both read the cores
where they lie, so these must not change in between, as in ``torch.nn.functional.linear``; stacked products keep
copies.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from hf_comera.ops.halves import Side, differentiable_gradients, stacked_halves
from hf_comera.ops.halves_kernels import Half, half_refusal, tt_halves, tt_halves_backward
from hf_comera.ops.kernel_switch import kernels_serve

__all__ = ["model_halves"]


def model_halves(sides: Sequence[Side]) -> list[list[Tensor]]:
    """The halves of every layer of every side, as :func:`hf_comera.ops.halves.stacked_halves` gives those of one.

    Returns:
        For each side L tensors ``(R, features)`` in its dtype, R for each layer.

    Source:
        CoMERA, arXiv:2405.14377, for the halves; all in one launch is ours.
    """
    found: dict[int, list[Tensor]] = {}
    launches: dict[Any, list[tuple[int, list[Half]]]] = {}
    for index, side in enumerate(sides):
        if halves := _for_kernel(side):
            launches.setdefault(_launch_key(side), []).append((index, halves))
        else:
            found[index] = stacked_halves(side)
    for launch in launches.values():
        together = [sides[index] for index, _ in launch]
        tensors = [tensor for side in together for tensor in side.tensors()]
        results = iter(_LaunchedHalves.apply(together, [half for _, halves in launch for half in halves], *tensors))
        found |= {index: list(islice(results, len(halves))) for index, halves in launch}
    return [found[index] for index in range(len(sides))]


class _LaunchedHalves(torch.autograd.Function):
    """Holds the memory that the cores had in forward, and no more; a backward pass can be made any number of times."""

    @staticmethod
    def forward(ctx: Any, sides: list[Side], halves: list[Half], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sides, ctx.halves = sides, halves
        ctx.versions = [_versions(half) for half in halves]
        return tuple(tt_halves(halves, sides[0].dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        for side in ctx.sides:
            side.has_met_backward = True
        layers = [(side, index) for side in ctx.sides for index in range(len(side.cores))]
        used = {place: grad for place, grad in enumerate(grads) if grad is not None}
        found: dict[int, list[Any]]
        for place in used:
            _check_unchanged(ctx.halves[place], ctx.versions[place])
        if torch.is_grad_enabled():
            found = {place: differentiable_gradients(*layers[place], grad) for place, grad in used.items()}
        else:
            all_grads = tt_halves_backward([ctx.halves[place] for place in used], list(used.values()))
            found = dict(zip(used, all_grads, strict=True))
        none = ([None] * (len(side.cores[index]) + len(side.gates[index])) for side, index in layers)
        return (None, None, *chain.from_iterable(found.get(place, missing) for place, missing in enumerate(none)))


def _for_kernel(side: Side) -> list[Half]:
    """What the kernels take for ``side``, copies of cores that are not contiguous; nothing if they do not take it."""
    if not kernels_serve(side.cores[0][0].device):
        return []
    halves = [
        Half(_contiguous(cores), side.on_left, side.features, rank, _contiguous(gates))
        for cores, gates, rank in zip(side.cores, side.gates, side.ranks(), strict=True)
    ]
    return [] if any(half_refusal(half, side.dtype) for half in halves) else halves


def _contiguous(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().contiguous() for tensor in tensors]


def _launch_key(side: Side) -> Any:
    """Equal for sides that one launch can take, and that all have a gradient or none."""
    core = side.cores[0][0]
    return core.dtype, core.device, side.dtype, any(tensor.requires_grad for tensor in side.tensors())


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
