"""Rank gates as functions on plain tensors: scale cores by them, slice ranks out of cores.

A gate sits on the bond between two neighbouring cores and has one number per rank, the diagonal of CoMERA's ``D_k``:
``W = G_1 D_1 G_2 D_2 ... G_K``. Gate k scales the last axis of core k, which is the same as the first of core k + 1.
"""

from collections.abc import Sequence

from torch import Tensor

__all__ = ["scale_cores", "slice_core"]


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
