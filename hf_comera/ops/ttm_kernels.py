"""Calls of the CUDA kernels of an embedding in tensor-train form: rows from half tables, gradients of the tables.

Sizes follow from shapes alone and nothing is read back from the device, so both can be captured in a CUDA graph.
"""

# Shapes here: those of ops/ttm_tables.py; T = ids (any axes), E = embedding size, V = vocabulary.

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.kernel_calls import current_stream, kernel_library, on_device, pointers
from hf_comera.ops.kernels import check_status

__all__ = ["ttm_rows", "ttm_table_gradients"]

DTYPES = (torch.float32, torch.bfloat16)


def ttm_rows(
    ids: Tensor, left: Tensor, right: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> Tensor:
    """Rows ``ids`` of the table that two half tables stand for, each made anew; sums in float32.

    An id outside ``[0, num_embeddings)`` gives a row of NaN.

    Shape:
        ids ``(...)``, left ``(A, H, R)``, right ``(B, R, K)``, both float32: ``(..., embedding_dim)`` in ``dtype``,
        float32 or bfloat16.

    Raises:
        ValueError: If the kernel cannot take the tables.
    """
    _check(left, right, dtype)
    hidden, right_rows, columns = left.shape[1], right.shape[0], right.shape[2]
    left_ARH = _padded(_padded(left, 2).transpose(1, 2), 2).contiguous()
    right_BRK = _padded(right, 1).contiguous()
    ids = ids.to(torch.int64).contiguous()
    rows = torch.empty(*ids.shape, embedding_dim, dtype=dtype, device=ids.device)
    sizes = (ids.numel(), num_embeddings, hidden, right_BRK.shape[1], columns, right_rows, embedding_dim)
    library = kernel_library(ids.device)
    with on_device(ids.device):
        status = library.hf_comera_ttm_rows(
            *pointers(ids, left_ARH, right_BRK, rows), *sizes, dtype == torch.bfloat16, current_stream(ids.device)
        )
    check_status(library, status, "ttm_rows")
    return rows


def ttm_table_gradients(
    grad: Tensor, ids: Tensor, left: Tensor, right: Tensor, num_embeddings: int, padding_idx: int | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of both half tables; the same bits each time.

    Shape:
        grad ``(..., E)``, float32 or bfloat16, ids ``(...)``: like ``left`` and ``right``, in float32.

    Raises:
        ValueError: If the kernel cannot take the tables.
    """
    _check(left, right, grad.dtype)
    (left_rows, hidden, rank), (right_rows, _, columns) = left.shape, right.shape
    left_AHR = _padded(left, 2).contiguous()
    right_BKR = _padded(right.transpose(1, 2), 2).contiguous()
    padded_rank, padded_hidden = left_AHR.shape[2], hidden + -hidden % 4
    library = kernel_library(left.device)
    _check_row(padded_hidden * columns, library.hf_comera_ttm_max_row())
    # Distinct ids without `unique`, whose result has a size that only the device knows.
    sorted_ids, order = torch.sort(ids.reshape(-1).to(torch.int64), stable=True)
    starts = torch.searchsorted(sorted_ids, torch.arange(num_embeddings + 1, device=ids.device))
    grad = grad.reshape(-1, grad.shape[-1]).contiguous()
    grad_rows = left.new_empty(grad.shape)
    num_shares = library.hf_comera_ttm_shares()
    left_shares = left.new_empty(num_shares, left_rows, padded_hidden, padded_rank)
    right_shares = left.new_empty(num_shares, right_rows, padded_rank, columns)
    tensors = (grad, order, sorted_ids, starts, grad_rows, left_AHR, right_BKR, left_shares, right_shares)
    counts = (len(order), num_embeddings, -1 if padding_idx is None else padding_idx)
    sizes = (hidden, padded_rank, columns, left_rows, right_rows, grad.shape[-1])
    with on_device(left.device):
        status = library.hf_comera_ttm_gradients(
            *pointers(*tensors), *counts, *sizes, grad.dtype == torch.bfloat16, current_stream(left.device)
        )
    check_status(library, status, "ttm_table_gradients")
    return left_shares.sum(0)[:, :hidden, :rank], right_shares.sum(0)[:, :rank]


def _padded(table: Tensor, axis: int) -> Tensor:
    """Zeros up to a multiple of 4 on one axis, so that four neighbours can be read at once."""
    return pad(table, (0, 0) * (table.dim() - 1 - axis) + (0, -table.shape[axis] % 4))


def _check(left: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    if left.dtype != torch.float32 or right.dtype != torch.float32 or dtype not in DTYPES:
        raise ValueError(
            "the lookup kernels take float32 tables and rows in float32 or bfloat16, not tables in "
            f"{left.dtype} and {right.dtype} and rows in {dtype}."
        )
    if left.shape[2] != right.shape[1]:
        raise ValueError(f"the ranks of the tables differ: left {tuple(left.shape)}, right {tuple(right.shape)}.")


def _check_row(size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(f"the lookup kernels take embedding rows of up to {limit} numbers with padding, not {size}.")
