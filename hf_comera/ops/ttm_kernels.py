"""Calls of the CUDA kernels of an embedding in tensor-train form: rows from half tables, gradients of the tables.

Sizes follow from shapes alone and nothing is read back from the device, so both can be captured in a CUDA graph.
"""

# Shapes here: those of ops/ttm_tables.py; T = ids (any axes), E = embedding size, V = vocabulary.

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.kernel_calls import current_stream, on_device, pointers
from hf_comera.ops.kernels import check_status, kernel_library, kernels_refusal

__all__ = ["lookup_refusal", "ttm_rows", "ttm_table_gradients"]

DTYPES = (torch.float32, torch.bfloat16)
MAX_ROW = 8192  # of kernels/ttm_lookup.cu


def lookup_refusal(ids: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot look up ``ids`` in these tables, or None where they can.

    Shape:
        ids ``(...)``, left ``(A, H, R)``, right ``(B, R, K)``; ``dtype`` is that of the rows and of their gradients.
    """
    if ids.is_floating_point() or ids.is_complex():
        return f"they take ids of an integer dtype, not {ids.dtype}"
    if left.dtype != torch.float32 or right.dtype != torch.float32 or dtype not in DTYPES:
        return (
            "they take float32 tables and rows in float32 or bfloat16, not tables in "
            f"{left.dtype} and {right.dtype} and rows in {dtype}"
        )
    if not ids.device == left.device == right.device:
        return f"ids and tables are on different devices: {ids.device}, {left.device}, {right.device}"
    if left.shape[2] != right.shape[1]:
        return f"the ranks of the tables differ: left {tuple(left.shape)}, right {tuple(right.shape)}"
    if left.device.type not in ("cpu", "cuda"):
        return f"they run on CUDA devices, not on {left.device}"
    if left.device.type == "cuda" and (reason := kernels_refusal(left.device)):
        return reason
    size = _padded_hidden(left) * right.shape[2]
    return f"they take embedding rows of up to {MAX_ROW} numbers with padding, not {size}" if size > MAX_ROW else None


def ttm_rows(
    ids: Tensor, left: Tensor, right: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> Tensor:
    """Rows ``ids`` of the table that two half tables stand for, each made anew; sums in float32.

    An id outside ``[0, num_embeddings)`` gives a row of NaN.

    Shape:
        ids ``(...)``, left ``(A, H, R)``, right ``(B, R, K)``, both float32: ``(..., embedding_dim)`` in ``dtype``,
        float32 or bfloat16.

    Raises:
        ValueError: If the kernel cannot take the tables; ``lookup_refusal`` says so beforehand.
    """
    _check(ids, left, right, dtype)
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
        ValueError: If the kernel cannot take the tables; ``lookup_refusal`` says so beforehand.
    """
    _check(ids, left, right, grad.dtype)
    (left_rows, hidden, rank), (right_rows, _, columns) = left.shape, right.shape
    left_AHR = _padded(left, 2).contiguous()
    right_BKR = _padded(right.transpose(1, 2), 2).contiguous()
    padded_rank, padded_hidden = left_AHR.shape[2], _padded_hidden(left)
    library = kernel_library(left.device)
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


def _padded_hidden(left: Tensor) -> int:
    """Hidden factor of the left table as the backward kernel wants it."""
    return left.shape[1] + -left.shape[1] % 4


def _check(ids: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    if reason := lookup_refusal(ids, left, right, dtype):
        raise ValueError(f"the lookup has no kernel for this: {reason}.")
