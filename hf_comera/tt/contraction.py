"""Carry a contraction path out with plain torch: build the parts from the cores, apply them to the input."""

# Shapes here: T = rows, I = in features, O = out features, R = rank of the bond at which the train is cut.

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.tt.path import ContractionPath, Order

__all__ = ["apply_parts", "build_parts", "contract"]


def contract(x: Tensor, cores: Sequence[Tensor], path: ContractionPath) -> Tensor:
    """``x @ W`` along ``path``, differentiable by autograd; every path computes the same up to rounding.

    Args:
        x: Input.
        cores: ``(r_{k-1}, n_k, r_k)``, in the dtype of ``x``.
        path: Planned for the factors of ``cores``; its ranks and rows need not be theirs.

    Shape:
        ``(..., in_features) -> (..., out_features)``.
    """
    return apply_parts(x, build_parts(cores, path), path)


def build_parts(
    cores: Sequence[Tensor], path: ContractionPath, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """All of ``path`` that does not need the input: what may be kept while the cores stay the same.

    Args:
        cores: ``(r_{k-1}, n_k, r_k)``; they are contracted in their own dtype.
        path: Which parts, and in which order their cores are multiplied.
        dtype: That of the parts; default that of the cores. The matrix of a dense path is multiplied in it.

    Shape:
        Dense: one matrix ``(I, O)``. Otherwise two, of ``I R`` and ``R O`` entries times the factors that the cut
        leaves on the other side.
    """
    left, right = _merge(cores, path.left_order), _merge(cores, path.right_order)
    rank, inputs, outputs = left.shape[-1], path.problem.in_features, path.problem.out_features
    if path.bond < path.num_in:  # the factors of the input that are left come first, as in the code
        left = left.reshape(-1, rank)
        right = right.reshape(rank, path.rest, -1)[:, :, :outputs].transpose(0, 1).reshape(path.rest * rank, outputs)
    elif path.bond > path.num_in:
        left = left.reshape(-1, path.rest * rank)[:inputs]
        right = right.reshape(rank, -1)
    else:
        left, right = left.reshape(-1, rank)[:inputs], right.reshape(rank, -1)[:, :outputs]
    if dtype is not None:
        left, right = left.to(dtype), right.to(dtype)
    return (left @ right,) if path.kind == "dense" else (left, right)


def apply_parts(x: Tensor, parts: tuple[Tensor, ...], path: ContractionPath) -> Tensor:
    """``x @ W`` from what :func:`build_parts` has made.

    Shape:
        ``(..., in_features) -> (..., out_features)``.
    """
    x_TI = x.reshape(-1, x.shape[-1])
    if path.kind == "dense":
        y_TO = x_TI @ parts[0]
    elif path.bond < path.num_in:
        left, right = parts
        padded = pad(x_TI, (0, left.shape[0] * path.rest - x_TI.shape[1]))
        unfolded = padded.reshape(x_TI.shape[0], left.shape[0], path.rest).transpose(1, 2).reshape(-1, left.shape[0])
        y_TO = (unfolded @ left).reshape(x_TI.shape[0], right.shape[0]) @ right
    elif path.bond > path.num_in:
        left, right = parts
        folded = (x_TI @ left).reshape(-1, right.shape[0]) @ right
        y_TO = folded.reshape(x_TI.shape[0], path.rest * right.shape[1])[:, : path.problem.out_features]
    else:
        y_TO = x_TI @ parts[0] @ parts[1]
    return y_TO.reshape(*x.shape[:-1], path.problem.out_features)


def _merge(cores: Sequence[Tensor], order: Order) -> Tensor:
    """The product of neighbouring cores ``(r, n, s)``, multiplied pair by pair as ``order`` says."""
    if isinstance(order, int):
        return cores[order]
    left, right = _merge(cores, order[0]), _merge(cores, order[1])
    product = left.reshape(-1, left.shape[-1]) @ right.reshape(right.shape[0], -1)
    return product.reshape(left.shape[0], -1, right.shape[-1])
