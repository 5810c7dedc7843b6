"""Tensor-train cores as plain tensors: contract them to halves, send gradients back, draw them, count them.

A core has shape ``(left rank, factor, right rank)``. A TTM core ``(left rank, row factor, column factor, right
rank)`` is handled here as a core whose factor is ``row factor * column factor``.

A gate sits on the bond between two neighbouring cores and has one number per rank, the diagonal of CoMERA's ``D_k``:
``W = G_1 D_1 G_2 D_2 ... G_K``. Gate k scales the last axis of core k, which is the same as the first of core k + 1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "contract_left",
    "contract_left_backward",
    "contract_right",
    "contract_right_backward",
    "core_shapes",
    "count_parameters",
    "draw_cores",
    "finite_norms",
    "scale_cores",
    "slice_core",
    "train_norm",
]


def contract_left(cores: Sequence[Tensor]) -> list[Tensor]:
    """Products of the first 1, 2, ..., d cores, grown from the left.

    Shape:
        cores ``(..., r_{k-1}, n_k, r_k)`` with ``r_0 = 1`` -> d matrices ``(..., n_1 ... n_k, r_k)``; the last one is
        the half.
    """
    prefixes = [cores[0].flatten(-3, -2)]
    for core in cores[1:]:
        product = prefixes[-1] @ core.flatten(-2)
        prefixes.append(product.reshape(*core.shape[:-3], -1, core.shape[-1]))
    return prefixes


def contract_left_backward(cores: Sequence[Tensor], prefixes: Sequence[Tensor], grad_half: Tensor) -> list[Tensor]:
    """Gradient of each core, given the gradient of ``contract_left(cores)[-1]``.

    Args:
        cores: As there.
        prefixes: What it gave, without the half.
        grad_half: The gradient.

    Shape:
        ``grad_half`` ``(..., n_1 ... n_d, r_d)`` -> one gradient of each core's shape.
    """
    grads: list[Tensor] = []
    grad = grad_half
    for core, prefix in zip(reversed(cores[1:]), reversed(prefixes), strict=True):
        grad = grad.reshape(*prefix.shape[:-1], -1)
        grads.append((prefix.mT @ grad).reshape(core.shape))
        grad = grad @ core.flatten(-2).mT
    grads.append(grad.reshape(cores[0].shape))
    return grads[::-1]


def contract_right(cores: Sequence[Tensor]) -> list[Tensor]:
    """Products of the last d, d-1, ..., 1 cores, grown from the right, which is the cheap end.

    Shape:
        cores ``(..., r_{k-1}, n_k, r_k)`` with ``r_d = 1`` -> d matrices ``(..., r_{k-1}, n_k ... n_d)``; the first is
        the half.
    """
    suffixes = [cores[-1].flatten(-2)]
    for core in reversed(cores[:-1]):
        product = core.flatten(-3, -2) @ suffixes[-1]
        suffixes.append(product.reshape(*core.shape[:-2], -1))
    return suffixes[::-1]


def contract_right_backward(cores: Sequence[Tensor], suffixes: Sequence[Tensor], grad_half: Tensor) -> list[Tensor]:
    """Gradient of each core, given the gradient of ``contract_right(cores)[0]``.

    Args:
        cores: As there.
        suffixes: What it gave, without the half.
        grad_half: The gradient.

    Shape:
        ``grad_half`` ``(..., r_0, n_1 ... n_d)`` -> one gradient of each core's shape.
    """
    grads: list[Tensor] = []
    grad = grad_half
    for core, suffix in zip(cores[:-1], suffixes, strict=True):
        grad = grad.reshape(*core.shape[:-3], -1, suffix.shape[-1])
        grads.append((grad @ suffix.mT).reshape(core.shape))
        grad = core.flatten(-3, -2).mT @ grad
    grads.append(grad.reshape(cores[-1].shape))
    return grads


def core_shapes(factors: Sequence[int], ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Shapes of all cores from their factors and the ranks of the inner bonds.

    >>> core_shapes((4, 5, 6), (2, 3))
    [(1, 4, 2), (2, 5, 3), (3, 6, 1)]
    """
    bonds = (1, *ranks, 1)
    return [(bonds[k], factor, bonds[k + 1]) for k, factor in enumerate(factors)]


def count_parameters(factors: Sequence[int], ranks: Sequence[int]) -> int:
    """Number of entries of all cores.

    >>> count_parameters((12, 8, 8, 8, 8, 12), (12, 30, 30, 30, 12))
    20448
    """
    return sum(math.prod(shape) for shape in core_shapes(factors, ranks))


def train_norm(cores: Sequence[Tensor]) -> float:
    """Frobenius norm of the tensor that the cores stand for, from products of rank size only (in float64)."""
    gram = torch.ones(1, 1, dtype=torch.float64, device=cores[0].device)
    for core in cores:
        flat = core.detach().double().reshape(core.shape[0], -1)
        moved = (gram @ flat).reshape(-1, core.shape[-1])  # sum over the left rank of one of the two copies
        gram = flat.reshape(-1, core.shape[-1]).T @ moved
    return math.sqrt(max(gram.item(), 0.0))


@torch.no_grad()
def draw_cores(cores: Sequence[Tensor], std: float, num_left: int | None = None) -> None:
    """Fill ``cores`` in place with a random train of the flattest spectrum and entries of deviation ``std``.

    The cores on the left of the middle bond get orthonormal columns, those on its right orthonormal rows, so every
    singular value at the middle is the same: no rank starts weaker than another. (Where a rank exceeds factor times
    neighbouring rank, as only uneven ranks given by hand do, not quite.) The condition of the train does not worsen
    with its length, as that of a product of normal draws does. One factor, the same for all cores, then gives the
    implied matrix the norm of a dense draw, so that gradients of all cores are about equal.

    Args:
        cores: Parameters to fill; meta and empty tensors are left alone.
        std: Root mean square of the entries of the implied matrix, exact up to rounding.
        num_left: Cores on the left of the middle bond; default half of them.

    Source:
        Deviation of every entry as in a dense layer: CoMERA, arXiv:2405.14377. Orthonormal halves are the flat limit
        of the spectral initialisation of Khodak et al., arXiv:2105.01029.
    """
    if cores[0].is_meta or cores[0].numel() == 0:
        return
    num_left = len(cores) // 2 if num_left is None else num_left
    for place, core in enumerate(cores):
        shape = (-1, core.shape[-1]) if place < num_left else (core.shape[0], -1)
        normal = torch.empty_like(core, dtype=torch.promote_types(core.dtype, torch.float32)).normal_()
        unfolding = normal.reshape(shape)
        core.copy_(_orthonormal(unfolding).reshape(core.shape))
    entries = math.prod(size for core in cores for size in core.shape[1:-1])
    scale = (std * math.sqrt(entries) / train_norm(cores)) ** (1 / len(cores))
    for core in cores:
        core.mul_(scale)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns, or rows where there are fewer of them, with the span of ``matrix``."""
    if matrix.shape[0] < matrix.shape[1]:
        return torch.linalg.qr(matrix.mT).Q.mT
    return torch.linalg.qr(matrix).Q


def scale_cores(cores: Sequence[Tensor], gates: Sequence[Tensor]) -> list[Tensor]:
    """The cores with the gates multiplied in, in the dtype of the cores; differentiable.

    Args:
        cores: K cores.
        gates: One per inner bond, ``(r_k,)``; or none.

    Shape:
        ``(r_{k-1}, ..., r_k)`` -> the same.

    Source:
        CoMERA, arXiv:2405.14377, rank-adaptive training.
    """
    if not gates:
        return list(cores)
    scaled = [(core * gate).to(core.dtype) for core, gate in zip(cores[:-1], gates, strict=True)]
    return [*scaled, cores[-1]]


def slice_core(core: Tensor, before: Tensor | None, behind: Tensor | None) -> Tensor:
    """``core`` with only some ranks of the bond before it, and of the one behind it.

    Args:
        core: ``(r_{k-1}, ..., r_k)``, or anything of that shape, as the moments of an optimizer.
        before: Indices of the ranks to keep on the first axis; None for all.
        behind: Indices of the ranks to keep on the last axis; None for all.
    """
    if before is not None:
        core = core.index_select(0, before)
    if behind is not None:
        core = core.index_select(-1, behind)
    return core.contiguous()


_SMALLER = 2.0**-80  # with it the squares of 2**31 entries of float32, and of bfloat16, cannot overflow


def finite_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each tensor; one that is too large for the dtype is the largest number that is not.

    Args:
        tensors: Of one dtype, not float16, whose range is too small for this, and one device.

    Shape:
        T tensors of any shapes -> ``(T,)``.
    """
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    of_smaller = torch.stack(torch._foreach_norm(torch._foreach_mul(list(tensors), _SMALLER)))
    return torch.where(norms.isinf(), of_smaller / _SMALLER, norms).clamp_max(torch.finfo(norms.dtype).max)
