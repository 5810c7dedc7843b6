"""Calls of the CUDA kernels of an embedding in tensor-train form: rows from half tables, gradients of the tables.

Sizes follow from shapes alone and nothing is read back from the device, so both can be captured in a CUDA graph. They
grow with the ids and with the rows of the two tables, not with the vocabulary.
"""

# Shapes here: those of ops/ttm_embedding.py; T = ids (any axes), E = embedding size.

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.cuda.dispatch import check_taken, place_refusal
from hf_comera.ops.cuda.library import check_status, current_stream, kernel_library, on_device, pointers

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
    if left.shape[2] != right.shape[1]:
        return f"the ranks of the tables differ: left {tuple(left.shape)}, right {tuple(right.shape)}"
    if (size := _padded_hidden(left) * right.shape[2]) > MAX_ROW:
        return f"they take embedding rows of up to {MAX_ROW} numbers with padding, not {size}"
    return place_refusal(ids, left, right)


def ttm_rows(
    ids: Tensor, left: Tensor, right: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> Tensor:
    """Rows ``ids`` of the table that two half tables stand for, each made for itself; sums in float32.

    An id outside ``[0, num_embeddings)`` gives a row of NaN.

    Shape:
        ids ``(...)``, left ``(A, H, R)``, right ``(B, R, K)``, both float32: ``(..., embedding_dim)`` in ``dtype``,
        float32 or bfloat16.

    Raises:
        NoKernelError: If the kernel cannot take the tables; ``lookup_refusal`` says so beforehand.
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
        NoKernelError: If the kernel cannot take the tables; ``lookup_refusal`` says so beforehand.
    """
    _check(ids, left, right, grad.dtype)
    (left_rows, hidden, rank), (right_rows, _, columns) = left.shape, right.shape
    limit = left_rows * right_rows
    ids = ids.reshape(-1).to(torch.int64)
    outside = (ids < 0) | (ids >= num_embeddings)
    if padding_idx is not None:
        outside |= ids == padding_idx
    # ids that get no gradient come last, as ids that no table has
    sorted_ids, order = torch.sort(ids.masked_fill(outside, limit), stable=True)
    grad_rows = _gradient_rows(grad.reshape(-1, grad.shape[-1]).contiguous(), order, sorted_ids, limit)
    keys, places = _distinct(sorted_ids, limit)
    left_AHR = _padded(left, 2).contiguous()
    right_BKR = _padded(right.transpose(1, 2), 2).contiguous()
    sizes = (hidden, left_AHR.shape[2], columns)
    left_part = _TableGradient(True, grad_rows, keys, places, left_rows, right_rows)
    turned = torch.where(keys < limit, keys % right_rows * left_rows + keys // right_rows, limit)
    turned, turn = torch.sort(turned)
    right_part = _TableGradient(False, grad_rows, turned, places[turn], right_rows, left_rows)
    dleft = left_part.compute(right_BKR, (_padded_hidden(left), left_AHR.shape[2]), sizes)
    dright = right_part.compute(left_AHR, (left_AHR.shape[2], columns), sizes)
    return dleft[:, :hidden, :rank], dright[:, :rank]


def _gradient_rows(grad: Tensor, order: Tensor, sorted_ids: Tensor, limit: int) -> Tensor:
    """Sums of the rows of ``grad`` of each id, at its first place in sorted order; elsewhere nothing to be read."""
    grad_rows = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
    library = kernel_library(grad.device)
    with on_device(grad.device):
        status = library.hf_comera_ttm_grad_rows(
            *pointers(grad, order, sorted_ids, grad_rows),
            *(len(order), limit, grad.shape[1], grad.dtype == torch.bfloat16),
            current_stream(grad.device),
        )
    check_status(library, status, "ttm_grad_rows")
    return grad_rows


def _distinct(sorted_ids: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Each id once, and its first place; then ``limit``. Not ``unique``, of whose size only the device would know."""
    is_first = torch.ones_like(sorted_ids, dtype=torch.bool)
    is_first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    numbers = torch.arange(1, len(sorted_ids) + 1, device=sorted_ids.device)
    places = torch.searchsorted(is_first.cumsum(0), numbers)
    return pad(sorted_ids, (0, 1), value=limit)[places], places


class _TableGradient(NamedTuple):
    """Gradient of one half table, from the distinct ids in the order of its rows."""

    is_left: bool
    grad_rows: Tensor
    keys: Tensor
    """Row of this table times ``num_others``, plus row of the other table."""
    places: Tensor
    num_rows: int
    num_others: int

    def compute(self, other: Tensor, shape: tuple[int, int], sizes: tuple[int, int, int]) -> Tensor:
        """With the other table; ``shape`` is that of a row of the gradient, ``sizes`` are H, R (padded) and K."""
        device = self.keys.device
        library = kernel_library(device)
        firsts = torch.arange(0, self.num_rows * self.num_others + 1, self.num_others, device=device)
        bounds = torch.searchsorted(self.keys, firsts)
        num_pieces = -(-len(self.keys) // library.hf_comera_ttm_entries())
        partials = self.grad_rows.new_empty(self.num_rows + num_pieces, *shape)
        result = self.grad_rows.new_empty(self.num_rows, *shape)
        with on_device(device):
            status = library.hf_comera_ttm_table_gradient(
                self.is_left,
                *pointers(self.grad_rows, self.keys, self.places, bounds, other, partials, result),
                *(len(self.keys), self.num_rows, self.num_others, *sizes, self.grad_rows.shape[1]),
                current_stream(device),
            )
        check_status(library, status, "ttm_table_gradient")
        return result


def _padded(table: Tensor, axis: int) -> Tensor:
    """Zeros up to a multiple of 4 on one axis, so that four neighbours can be read at once."""
    return pad(table, (0, 0) * (table.dim() - 1 - axis) + (0, -table.shape[axis] % 4))


def _padded_hidden(left: Tensor) -> int:
    """Hidden factor of the left table as the backward kernel wants it."""
    return left.shape[1] + -left.shape[1] % 4


def _check(ids: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    check_taken("the lookup", lookup_refusal(ids, left, right, dtype))
