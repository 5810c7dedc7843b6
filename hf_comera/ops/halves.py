"""The halves of tensor trains, ``W = left.T @ right``: of one layer, and of the layers of a model in few operations.

Cores of layers with equal factors are stacked, ranks that differ padded with zeros, and contracted together; so are
the gradients on the way back. Neither depends on the batch.

The operators ``hf_comera::tt_halves`` and ``hf_comera::tt_halves_backward`` take sides of any factors and ranks
together; their bodies in plain torch are the reference. Both read the cores where they lie, so these must not change
in between, as in ``torch.nn.functional.linear``. Where no kernels serve the device, stacked products keep copies
instead, with which backward multiplies less.

Source: CoMERA, arXiv:2405.14377, contraction paths, for the halves; stacking the layers of a model is ours.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.autograd import gradients_of
from hf_comera.ops.cuda.dispatch import kernels_serve, register_cuda_kernel
from hf_comera.ops.cuda.halves import Half, tt_halves, tt_halves_backward
from hf_comera.ops.precision import chain_dtype
from hf_comera.tt.cores import contract_left, contract_left_backward, contract_right, contract_right_backward
from hf_comera.tt.padding import RaggedStacks

__all__ = [
    "RANK_MULTIPLE",
    "Side",
    "StackedProducts",
    "differentiable_gradients",
    "layer_halves",
    "model_halves",
    "multiply_stacked",
    "padded_rank",
    "stacked_gradients",
    "stacked_halves",
]

# Shapes here: I = in features, O = out features, R = middle rank rounded up to a multiple of RANK_MULTIPLE,
# L = layers, F = features of one side.


# CPU libraries are markedly faster with 32 columns than with 30, and GPUs fill whole tensor-core tiles.
RANK_MULTIPLE = 8


def padded_rank(rank: int) -> int:
    """``rank`` rounded up to a multiple of :data:`RANK_MULTIPLE`."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def layer_halves(cores: Sequence[Tensor], num_in: int, in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    """``left_RI`` and ``right_RO`` with ``W = left.T @ right``, by differentiable products in float32 or better.

    Args:
        cores: ``(r_{k-1}, n_k, r_k)``, all of one train.
        num_in: How many of them carry input factors.
        in_features: Rows of W; rows that the input factors cover beyond them are cut off.
        out_features: Columns of W, likewise.

    Returns:
        The halves, their middle rank padded with zeros.

    Source:
        CoMERA, arXiv:2405.14377.
    """
    left = _one_half(cores[:num_in], True, in_features)
    return left, _one_half(cores[num_in:], False, out_features)


@dataclass
class Side:
    """One side, left or right, of the trains of L layers whose factors are equal."""

    cores: list[list[Tensor]]
    """For each layer, the cores ``(r_{k-1}, n_k, r_k)`` of this side."""
    gates: list[list[Tensor]]
    """For each layer, the rank gates ``(r_k,)`` on the last axis of its first cores; empty lists without gates."""
    on_left: bool
    features: int
    dtype: torch.dtype
    """Of the halves that come out."""

    def tensors(self) -> list[Tensor]:
        """Cores and gates of one layer after the other."""
        return [tensor for pair in zip(self.cores, self.gates, strict=True) for part in pair for tensor in part]

    def stacked(self) -> tuple[list[Tensor], list[Tensor]]:
        """Cores ``(L, r_{k-1}, n_k, r_k)`` and gates ``(L, 1, 1, r_k)`` of each place, in the dtype of the chain."""
        dtype, everyone = chain_dtype(self.cores[0][0]), range(len(self.cores))
        stacks = self.stacks_of_cores(everyone)
        cores = stacks.spread(stacks.join(list(zip(*self.cores, strict=True))).to(dtype))
        if not self.gates[0]:
            return cores, []
        stacks = self.stacks_of_gates(everyone)
        gates = stacks.spread(stacks.join(list(zip(*self.gates, strict=True))).to(dtype))
        return cores, [gate[:, None, None] for gate in gates]

    def stacks_of_cores(self, layers: Sequence[int]) -> RaggedStacks:
        """How the cores of some layers are stacked, one stack a place."""
        shapes = [
            [core.shape for core in place] for place in zip(*(self.cores[index] for index in layers), strict=True)
        ]
        return _stacks(shapes, self._padded_shapes(), self.cores[0][0].device)

    def stacks_of_gates(self, layers: Sequence[int]) -> RaggedStacks:
        """The same for their gates."""
        shapes = [
            [gate.shape for gate in place] for place in zip(*(self.gates[index] for index in layers), strict=True)
        ]
        padded = [shape[-1:] for shape in self._padded_shapes()[: len(shapes)]]
        return _stacks(shapes, padded, self.cores[0][0].device)

    @property
    def num_stacked(self) -> int:
        """Entries of the stacked cores, with padding."""
        return len(self.cores) * sum(map(math.prod, self._padded_shapes()))

    def _padded_shapes(self) -> list[tuple[int, ...]]:
        """The padded shapes of the cores of each place: the largest ranks, the middle one as products need it."""
        shapes = [
            tuple(max(sizes) for sizes in zip(*(core.shape for core in place), strict=True))
            for place in zip(*self.cores, strict=True)
        ]
        if self.on_left:
            shapes[-1] = (*shapes[-1][:-1], padded_rank(shapes[-1][-1]))
        else:
            shapes[0] = (padded_rank(shapes[0][0]), *shapes[0][1:])
        return shapes

    def ranks(self) -> list[int]:
        """Rows of the half of each layer."""
        middle = (cores[-1].shape[-1] if self.on_left else cores[0].shape[0] for cores in self.cores)
        return [padded_rank(rank) for rank in middle]


def stacked_halves(side: Side) -> list[Tensor]:
    """The half of every layer of ``side``: ``left_RF``, or ``right_RF``.

    The gradient can be asked for any number of times, for any of the halves. Only halves that were used give their
    cores a gradient.

    Returns:
        L tensors ``(R, features)`` in ``side.dtype``, R for each layer.

    Source:
        CoMERA, arXiv:2405.14377, for the halves.
    """
    return list(_StackedHalves.apply(side, *side.tensors()))


class StackedProducts(NamedTuple):
    """The intermediate products that gradients of stacked halves need: one stack for each place in a tensor train."""

    cores: list[Tensor]
    gates: list[Tensor]
    scaled: list[Tensor]
    """Cores times gates."""
    inner: list[Tensor]
    """Products on the way to the halves."""


def multiply_stacked(side: Side) -> tuple[tuple[Tensor, ...], StackedProducts]:
    """The halves of :func:`stacked_halves`, parts of one tensor, without a gradient; and what a gradient needs."""
    cores, gates = side.stacked()
    # rounded like the cores that folding the gates gives
    stored, dtype = side.cores[0][0].dtype, cores[0].dtype
    scaled = [(core * gate).to(stored).to(dtype) for core, gate in zip(cores, gates, strict=False)]
    scaled += cores[len(scaled) :]
    products = contract_left(scaled) if side.on_left else contract_right(scaled)
    half, inner = (products[-1].mT, products[:-1]) if side.on_left else (products[0], products[1:])
    half_LRF = half[..., : side.features].to(side.dtype).contiguous()
    halves = tuple(half_RF[:rank] for half_RF, rank in zip(half_LRF.unbind(), side.ranks(), strict=True))
    return halves, StackedProducts(cores, gates, scaled, inner)


class _StackedHalves(torch.autograd.Function):
    """Keeps what backward needs itself: forward passes that share halves may have a backward pass each."""

    @staticmethod
    def forward(ctx: Any, side: Side, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.side, ctx.has_met_backward = side, False
        halves, ctx.products = multiply_stacked(side)
        return halves

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        side = ctx.side
        ctx.has_met_backward = True
        used = [index for index, grad in enumerate(grads) if grad is not None]
        if not used:
            found: list[list[Any]] = []
        elif torch.is_grad_enabled():
            found = [differentiable_gradients(side, index, grads[index]) for index in used]
        else:
            found = stacked_gradients(side, ctx.products, used, [grads[index] for index in used])
        of_layer = dict(zip(used, found, strict=True))
        none = [[None] * (len(cores) + len(gates)) for cores, gates in zip(side.cores, side.gates, strict=True)]
        return (None, *(grad for index, missing in enumerate(none) for grad in of_layer.get(index, missing)))


def stacked_gradients(
    side: Side, products: StackedProducts, used: Sequence[int], grads: Sequence[Any]
) -> list[list[Tensor]]:
    """Gradients of the cores and gates of the ``used`` layers, one list a layer, from those of their halves."""

    def of_used(stacked: list[Tensor]) -> list[Tensor]:
        if len(used) == len(side.cores):
            return stacked
        return [torch.stack([tensor[index] for index in used]) for tensor in stacked]  # an index list would be copied

    cores, gates, scaled, inner = map(of_used, products)
    covered = math.prod(core.shape[-2] for core in cores)
    rank = cores[-1].shape[-1] if side.on_left else cores[0].shape[-3]
    stacks = _stacks([[grad.shape for grad in grads]], [(rank, covered)], grads[0].device)
    (grad_LRF,) = stacks.spread(stacks.join([grads]).to(cores[0].dtype))
    if side.on_left:
        dscaled = contract_left_backward(scaled, inner, grad_LRF.mT)
    else:
        dscaled = contract_right_backward(scaled, inner, grad_LRF)
    triples = list(zip(dscaled, cores, gates, strict=False))
    dcores = [grad * gate for grad, _, gate in triples] + dscaled[len(gates) :]
    found = _by_layer(side.stacks_of_cores(used), dcores, side.cores[0][0].dtype)
    if gates:
        dgates = [(grad * core).sum((1, 2)) for grad, core, _ in triples]
        more = _by_layer(side.stacks_of_gates(used), dgates, side.gates[0][0].dtype)
        found = [[*one, *other] for one, other in zip(found, more, strict=True)]
    return found


def _by_layer(stacks: RaggedStacks, stacked: list[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    """Tensors of all places, without padding, one list a layer."""
    parts, num_layers = stacks.unpack([part.to(dtype) for part in stacked]), stacks.padded[0][0]
    return [parts[index::num_layers] for index in range(num_layers)]


def differentiable_gradients(side: Side, index: int, grad: Any) -> list[Any]:
    """Gradients of the cores and gates of one layer, with a graph, for second derivatives."""
    cores, gates = side.cores[index], side.gates[index]

    def half_of(tensors: list[Any]) -> Tensor:
        pairs = zip(tensors, tensors[len(cores) :], strict=False)
        gated = [(core * gate).to(core.dtype) for core, gate in pairs] + tensors[len(gates) : len(cores)]
        return _one_half(gated, side.on_left, side.features).to(side.dtype)

    return gradients_of(half_of, [*cores, *gates], grad, create_graph=True)


def _one_half(cores: Sequence[Tensor], on_left: bool, features: int) -> Tensor:
    """The half of one layer, ``(R, features)``."""
    dtype = chain_dtype(cores[0])
    cores = [core.to(dtype) for core in cores]
    half = contract_left(cores)[-1][:features].T if on_left else contract_right(cores)[0][:, :features]
    extra = padded_rank(half.shape[0]) - half.shape[0]
    return pad(half, (0, 0, 0, extra)) if extra else half


def _stacks(
    shapes: Sequence[Sequence[Sequence[int]]], padded: Sequence[Sequence[int]], device: torch.device
) -> RaggedStacks:
    return _kept_stacks(tuple(tuple(map(tuple, place)) for place in shapes), tuple(map(tuple, padded)), device)


@lru_cache(maxsize=256)
def _kept_stacks(shapes: Any, padded: Any, device: torch.device) -> RaggedStacks:
    return RaggedStacks(shapes, device, padded)


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
        ctx.versions, ctx.has_met_backward = [_versions(half) for half in ctx.halves], False
        return tuple(_tt_halves(*_flat(ctx.halves), sides[0].dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.has_met_backward = True
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
    """The arguments of the operators for ``side``; copies of cores that are not contiguous."""
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
    """The halves that :func:`_flat` was given."""
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
