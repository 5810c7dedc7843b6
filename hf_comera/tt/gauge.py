"""Gauges of a tensor train: cores that stand for the same matrix, the canonical ones, and steps free of the choice.

The canonical basis. Across bond k the implied tensor is a matrix ``U V``: ``U`` is the product of the cores on the
left, ``V`` of the cores on the right. In the canonical basis ``U = P S^(1/2)`` and ``V = S^(1/2) Q`` with orthonormal
``P, Q`` and the singular values ``S`` of that matrix. No rank is a mixture of others, so each has a worth. The change
of basis is exact, every bond has one of its own, and the Gram matrices of the interfaces are enough to find it.

Steps on single cores. The implied tensor is ``left interface * core * right interface``, where the interfaces are the
products of the cores on either side. In the orthogonal gauge centred at that core both are isometries. There a step on
the core is a step of equal size on the matrix, and the core's gradient is the gradient of the matrix, projected. A
tensor train can be in that gauge for one core at a time. But the r x r Gram matrices of the interfaces are enough to
move a gradient into it and a step out of it. That serves all cores at once, and leaves the cores as they are.

All functions take stacks of tensor trains of equal shapes: any leading axes before those of a core. Tensor trains of
other ranks can be among them, zero-padded to equal shapes: padding stays zero and changes nothing if it is named
(``live``).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Factor",
    "canonical_bases",
    "interface_factors",
    "interface_grams",
    "interface_norms",
    "remove_gauge",
    "to_basis",
    "to_core",
    "to_orthogonal_gauge",
]

# Shapes here: r_k = ranks, n_k = middle axes of the cores (one or more).


# Part of the largest eigenvalue, or singular value, that weaker directions are raised to. So the change of basis stays
# invertible, in float64, where cores do not use all their ranks.
FLOOR = 1e-10


def canonical_bases(cores: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The change of basis of each inner bond, its inverse, and the singular values of the implied tensor there.

    Shape:
        K cores ``(r_{k-1}, ..., r_k)`` -> K - 1 matrices ``(r_k, r_k)``, their inverses, and K - 1 vectors ``(r_k,)``,
        descending; all in float64.

    Source:
        Vidal, "Efficient classical simulation of slightly entangled quantum computations", 2003. The diagonal matrices
        between cores of that canonical form are these singular values; here they are split between both neighbours.
    """
    flat = [core.detach().double().flatten(1, -2) for core in cores]
    left, right = interface_grams(flat)
    bases, inverses, spectra = [], [], []
    for before, behind in zip(left[1:-1], right[1:-1], strict=True):
        root, inverse_root = _roots(before)
        squared, vectors = torch.linalg.eigh(root @ behind @ root)
        squared, vectors = squared.flip(-1), vectors.flip(-1)
        values = squared.clamp_min(0).sqrt()
        kept = values.clamp_min(FLOOR * values[0].clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        bases.append(inverse_root @ vectors * kept)
        inverses.append((vectors / kept).mT @ root)
        spectra.append(values)
    return bases, inverses, spectra


def to_basis(core: Tensor, before: Tensor | None, behind: Tensor | None) -> Tensor:
    """``core`` with its first axis multiplied by ``before`` and its last by ``behind``, in its own dtype.

    Args:
        core: ``(r_{k-1}, ..., r_k)``.
        before: ``(r_{k-1}', r_{k-1})`` or None.
        behind: ``(r_k, r_k')`` or None.
    """
    moved = core.double()
    if before is not None:
        moved = (before @ moved.flatten(1)).view(-1, *core.shape[1:])
    if behind is not None:
        moved = moved @ behind
    return moved.to(core.dtype)


def _roots(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of a Gram matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(gram)
    roots = values.clamp_min(FLOOR * values[-1].clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    return vectors * roots @ vectors.mT, vectors / roots @ vectors.mT


# Shapes here: ... = any leading axes (trains of equal shapes), K = cores, r_k = ranks, n_k = factors.


# Part of the mean that is added to the spectrum of an interface. Without it, a direction in which the other cores are
# almost zero would ask for an almost infinite step.
DAMPING = 1e-3


class Factor(NamedTuple):
    """Cholesky factor of a Gram matrix, and its inverse.

    Products with the inverse of such a small triangle take a third of the time of solving with it for every gradient
    and step; damping keeps its condition low.
    """

    lower: Tensor
    inverse: Tensor


def interface_factors(
    cores: list[Tensor], live: Sequence[Tensor | None] | None = None
) -> tuple[list[Factor], list[Factor]]:
    """Factors of the Gram matrices of the interfaces before, and of those behind, each core.

    Args:
        cores: K cores.
        live: For each of the K + 1 bonds which ranks are no padding, ``(..., r_k)``, or None for all. The outer ones
            have rank 1 and no padding.

    Shape:
        cores ``(..., r_{k-1}, n_k, r_k)`` -> K triangles ``(..., r_{k-1}, r_{k-1})`` and K ``(..., r_k, r_k)``.
    """
    left, right = interface_grams(cores)
    outer = _factor(left[0].clone(), None)
    live = [None] * len(left) if live is None else live
    inner = zip(left[1:-1], right[1:-1], live[1:-1], strict=True)
    both = [_factor(torch.stack([before, behind]), mask) for before, behind, mask in inner]
    before = [Factor(factor.lower[0], factor.inverse[0]) for factor in both]
    behind = [Factor(factor.lower[1], factor.inverse[1]) for factor in both]
    return [outer, *before], [*behind, outer]


def interface_norms(cores: list[Tensor]) -> list[float]:
    """For each core of one train: the most that a step on it is stretched on its way to the implied tensor.

    The product of the spectral norms of the two interfaces, computed in float64.

    Shape:
        cores ``(r_{k-1}, n_k, r_k)`` -> K numbers.
    """
    left, right = interface_grams([core.detach().double() for core in cores])
    largest_before = [torch.linalg.eigvalsh(gram).max().item() for gram in left[:-1]]
    largest_behind = [torch.linalg.eigvalsh(gram).max().item() for gram in right[1:]]
    return [max(a * b, 0.0) ** 0.5 for a, b in zip(largest_before, largest_behind, strict=True)]


def to_orthogonal_gauge(gradient: Tensor, left: Factor, right: Factor) -> Tensor:
    """The gradient of a core as it would be if both interfaces were isometries.

    Args:
        gradient: ``(..., r_{k-1}, n_k, r_k)``.
        left: Factor of the interface before the core, ``(..., r_{k-1}, r_{k-1})``.
        right: Factor of the interface behind it, ``(..., r_k, r_k)``.
    """
    moved = (left.inverse @ gradient.flatten(-2)).view_as(gradient)
    return (moved.flatten(-3, -2) @ right.inverse.mT).view_as(gradient)


def to_core(step: Tensor, left: Factor, right: Factor) -> Tensor:
    """The step of a core that does to the matrix what ``step`` does in the orthogonal gauge.

    Args:
        step: ``(..., r_{k-1}, n_k, r_k)``.
        left: Factor of the interface before the core.
        right: Factor of the interface behind it.
    """
    moved = (left.inverse.mT @ step.flatten(-2)).view_as(step)
    return (moved.flatten(-3, -2) @ right.inverse).view_as(step)


def remove_gauge(
    gradient: Tensor, core: Tensor, outer: Factor, *, on_left: bool, live: Tensor | None = None
) -> Tensor:
    """Take out of a core's gradient the directions that the neighbour towards the centre shares.

    A step that only mixes the ranks of the bond towards the centre, ``core -> core X``, can be left to the next core:
    both would move the matrix in the same direction. With that part left to one core, the centre, the directions of
    all cores are orthogonal.

    Args:
        gradient: In the orthogonal gauge, ``(..., r_{k-1}, n_k, r_k)``.
        core: The core itself, same shape.
        outer: Factor of the interface on the outer side of the core.
        on_left: Whether the centre is to the right.
        live: Which ranks of the bond towards the centre are no padding, ``(..., r)``, or None for all.

    Source:
        Tangent space of the manifold of tensor trains of fixed ranks: Holtz, Rohwedder, Schneider,
        "On manifolds of tensors of fixed TT-rank", Numerische Mathematik 120, 2012.
    """
    if on_left:
        frame = (outer.lower.mT @ core.flatten(-2)).view_as(core).flatten(-3, -2)
        columns = frame @ _factor(frame.mT @ frame, live).inverse.mT
        rows = gradient.flatten(-3, -2)
        return (rows - columns @ (columns.mT @ rows)).view_as(gradient)
    frame = (core.flatten(-3, -2) @ outer.lower).view_as(core).flatten(-2)
    rows = _factor(frame @ frame.mT, live).inverse @ frame
    unfolding = gradient.flatten(-2)
    return (unfolding - (unfolding @ rows.mT) @ rows).view_as(gradient)


def interface_grams(cores: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gram matrices ``(..., r_k, r_k)`` of what is left, and of what is right, of each of the K + 1 bonds."""
    ones = cores[0].new_ones(*cores[0].shape[:-3], 1, 1)
    left, right = [ones], [ones]
    for core in cores:
        rows = core.flatten(-3, -2)
        left.append(rows.mT @ (left[-1] @ core.flatten(-2)).view_as(rows))
    for core in reversed(cores):
        columns = core.flatten(-2)
        right.append((core.flatten(-3, -2) @ right[-1]).view_as(columns) @ columns.mT)
    return left, right[::-1]


def _factor(gram: Tensor, live: Tensor | None) -> Factor:
    """Of the damped Gram matrix, which takes the place of ``gram``; of zero, of a tiny multiple of the identity.

    Padded ranks get a diagonal of one: they are apart from the others, and zeros stay zero.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.sum(-1, keepdim=True) / (gram.shape[-1] if live is None else live.sum(-1, keepdim=True))
    damping = DAMPING * mean + torch.finfo(gram.dtype).tiny ** 0.5
    diagonal += damping if live is None else torch.where(live, damping, 1.0)
    lower = torch.linalg.cholesky_ex(gram).L
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return Factor(lower, torch.linalg.solve_triangular(lower, identity, upper=False))
