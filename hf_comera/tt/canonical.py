"""The canonical basis of every bond of a train: ranks sorted by singular values, orthogonal on both sides.

Across bond k the implied tensor is a matrix ``U V``: ``U`` what the cores on the left stand for, ``V`` those on the
right. In the canonical basis ``U = P S^(1/2)`` and ``V = S^(1/2) Q`` with orthonormal ``P, Q`` and the singular
values ``S`` of that matrix: no rank can be had from the others, so what each is worth can be told. The change of basis
is exact, every bond has one of its own, and the Gram matrices of the interfaces are enough to find it.
"""

# Shapes here: r_k = ranks, n_k = middle axes of the cores (one or more).

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_comera.tt.tangent import interface_grams

__all__ = ["canonical_bases", "to_basis"]

# Of the largest eigenvalue, or singular value: weaker directions are taken as so strong, which keeps the change of
# basis invertible, in float64, where cores do not use all their ranks.
FLOOR = 1e-10


def canonical_bases(cores: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The change of basis of each inner bond, its inverse, and the singular values of the implied tensor there.

    Shape:
        K cores ``(r_{k-1}, ..., r_k)`` -> K - 1 matrices ``(r_k, r_k)``, their inverses, and K - 1 vectors ``(r_k,)``,
        descending; all in float64.

    Source:
        Vidal, "Efficient classical simulation of slightly entangled quantum computations", 2003: the canonical form of
        a train, whose diagonal matrices between cores are these singular values; here they are split between both.
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
