"""The operator ``hf_comera::ttm_lookup``: rows of an embedding table held as TTM cores.

Two half tables are built, each distinct id is contracted once, and its row is copied to all its places. Only the ids
are saved for backward: everything else is cheap to build again.

How many ids are distinct is known on the device only. On a GPU, asking for it would make the host wait and could not
be part of a CUDA graph; there every place is contracted by itself, or, if the table has no more rows than there are
places, every row of the table once. Gradients are added up in a fixed order in both forms.

Rows from half tables and the gradients of these are operators of their own, for which there are CUDA kernels; their
bodies in plain torch are the reference. The half tables themselves are always products in torch.

Source: CoMERA, arXiv:2405.14377, optimised embedding lookup (unique rows, half tables). Doing both levels by default,
with an own backward, is ours.
"""

# Shapes here: V = vocabulary, E = embedding size, U = distinct ids, and those of ops/ttm_tables.py.

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.cuda import ttm_embedding as kernels
from hf_comera.ops.cuda.dispatch import register_cuda_kernel
from hf_comera.ops.precision import without_autocast
from hf_comera.ops.ttm_tables import HalfTables, half_tables, half_tables_backward

__all__ = ["check_ids", "look_up_in_tables", "ttm_lookup"]

# Rows contracted at once: bounds the gathered operands, which are wider than the rows they make.
ROWS_PER_CHUNK = 8192


def ttm_lookup(
    ids: Tensor, cores: list[Tensor], num_embeddings: int, embedding_dim: int, padding_idx: int | None = None
) -> Tensor:
    """Rows ``ids`` of the table that the cores stand for.

    Args:
        ids: Integer ids of any shape.
        cores: ``(r_{k-1}, v_k, h_k, r_k)``; products of ``v_k`` and ``h_k`` cover the two sizes.
        num_embeddings: Rows of the table; ids are checked against it on the CPU.
        embedding_dim: Columns of the table.
        padding_idx: Id whose row gets no gradient, as in ``torch.nn.Embedding``.

    Shape:
        ``(...) -> (..., embedding_dim)``, in the dtype of the cores.

    Raises:
        IndexError: If an id lies outside ``[0, num_embeddings)`` (on a CPU; torch on a GPU asserts on the device, the
            kernel gives a row of NaN).

    Source:
        CoMERA, arXiv:2405.14377, optimised TTM lookup.
    """
    with without_autocast(cores[0]):
        return _ttm_lookup(ids, cores, num_embeddings, embedding_dim, padding_idx)


@torch.library.custom_op("hf_comera::ttm_lookup", mutates_args=())
def _ttm_lookup(
    ids: Tensor, cores: list[Tensor], num_embeddings: int, embedding_dim: int, padding_idx: int | None
) -> Tensor:
    check_ids(ids, num_embeddings)
    return look_up_in_tables(ids, half_tables(cores), num_embeddings, embedding_dim, cores[0].dtype)


@_ttm_lookup.register_fake
def _(ids: Tensor, cores: list[Tensor], num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> Tensor:
    return cores[0].new_empty(*ids.shape, embedding_dim)


def look_up_in_tables(
    ids: Tensor, tables: HalfTables, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> Tensor:
    """Rows ``ids``, which are not checked, from half tables that are at hand, without a gradient.

    Shape:
        ``(...) -> (..., embedding_dim)``, in ``dtype``.
    """
    rows: Tensor = _ttm_rows(ids, tables.left, tables.right, num_embeddings, embedding_dim, dtype)
    return rows


@torch.library.custom_op("hf_comera::ttm_rows", mutates_args=())
def _ttm_rows(
    ids: Tensor, left: Tensor, right: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> Tensor:
    unique_U, place = _rows_to_make(ids.reshape(-1), num_embeddings)
    rows_UE = left.new_empty(unique_U.numel(), embedding_dim)
    for start, lefts, rights in _gathered(left, right, unique_U):
        part = rows_UE[start : start + lefts.shape[0]]
        if lefts.shape[1] * rights.shape[2] == embedding_dim:
            torch.bmm(lefts, rights, out=part.view(-1, lefts.shape[1], rights.shape[2]))
        else:
            part.copy_(torch.bmm(lefts, rights).flatten(1)[:, :embedding_dim])
    rows_UE = rows_UE.to(dtype)
    rows_NE = rows_UE if place is None else rows_UE.index_select(0, place)
    # models add to embeddings in place, which autograd forbids for views that an operator returns
    return torch.ops.aten._unsafe_view(rows_NE, [*ids.shape, embedding_dim])


@_ttm_rows.register_fake
def _(ids: Tensor, left: Tensor, right: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> Tensor:
    return left.new_empty(*ids.shape, embedding_dim, dtype=dtype)


register_cuda_kernel(_ttm_rows, kernels.ttm_rows)


@torch.library.custom_op("hf_comera::ttm_lookup_backward", mutates_args=())
def _ttm_lookup_backward(
    grad: Tensor, ids: Tensor, cores: list[Tensor], num_embeddings: int, padding_idx: int | None
) -> list[Tensor]:
    """An operator of its own, since the number of distinct ids is a shape that no compiler can know."""
    tables = half_tables(cores)
    dleft, dright = _ttm_table_gradients(grad, ids, tables.left, tables.right, num_embeddings, padding_idx)
    return half_tables_backward(tables, dleft, dright, cores)


@_ttm_lookup_backward.register_fake
def _(grad: Tensor, ids: Tensor, cores: list[Tensor], num_embeddings: int, padding_idx: int | None) -> list[Tensor]:
    return [torch.empty_like(core) for core in cores]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, cores, ctx.num_embeddings, _, ctx.padding_idx = inputs
    ctx.save_for_backward(ids, *cores)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    ids, *cores = ctx.saved_tensors
    with without_autocast(grad):
        grads = _ttm_lookup_backward(grad, ids, cores, ctx.num_embeddings, ctx.padding_idx)
        return None, grads, None, None, None


_ttm_lookup.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("hf_comera::ttm_table_gradients", mutates_args=())
def _ttm_table_gradients(
    grad: Tensor, ids: Tensor, left: Tensor, right: Tensor, num_embeddings: int, padding_idx: int | None
) -> tuple[Tensor, Tensor]:
    """Gradients of both half tables, summed over the distinct ids."""
    unique_U, place = _rows_to_make(ids.reshape(-1), num_embeddings)
    drows_UE = grad.reshape(-1, grad.shape[-1]).to(left.dtype)
    if place is not None:
        drows_UE = _summed_by_row(drows_UE, place, unique_U.numel())
    if padding_idx is not None:
        drows_UE = _without_row(drows_UE, unique_U == padding_idx)
    dleft, dright = torch.zeros_like(left), torch.zeros_like(right)
    hidden, columns = dleft.shape[1], dright.shape[2]
    if missing := hidden * columns - drows_UE.shape[1]:
        drows_UE = pad(drows_UE, (0, missing))
    for start, lefts, rights in _gathered(left, right, unique_U):
        stop = start + lefts.shape[0]
        drows = drows_UE[start:stop].view(-1, hidden, columns)
        row, column = _coordinates(right, unique_U[start:stop])
        _add_by_row(dleft, row, torch.bmm(drows, rights.transpose(1, 2)))
        _add_by_row(dright, column, torch.bmm(lefts.transpose(1, 2), drows))
    return dleft, dright


@_ttm_table_gradients.register_fake
def _(grad: Any, ids: Any, left: Tensor, right: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(left), torch.empty_like(right)


register_cuda_kernel(_ttm_table_gradients, kernels.ttm_table_gradients)


def _rows_to_make(ids_N: Tensor, num_embeddings: int) -> tuple[Tensor, Tensor | None]:
    """Ids to contract, and where each place finds its row among them; None where places and rows are the same."""
    if not _needs_static_shapes(ids_N):
        return torch.unique(ids_N, return_inverse=True)
    if ids_N.numel() < num_embeddings:
        return ids_N, None
    return torch.arange(num_embeddings, dtype=ids_N.dtype, device=ids_N.device), ids_N


def _needs_static_shapes(ids: Tensor) -> bool:
    """Whether no shape may depend on the values of ``ids``."""
    return ids.is_cuda


def _summed_by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """The sums of those ``values`` that go to the same of ``num_rows`` rows."""
    if not _needs_static_shapes(rows):
        return values.new_zeros(num_rows, *values.shape[1:]).index_add_(0, rows, values)
    # the backward of an embedding: unlike index_add_ on a GPU, it adds in a fixed order
    return torch.ops.aten.embedding_dense_backward(values.flatten(1), rows, num_rows, -1, False).view(
        num_rows, *values.shape[1:]
    )


def _without_row(values: Tensor, is_row: Tensor) -> Tensor:
    """``values`` with zeros where ``is_row``; in place, without a pass over all, where shapes may depend on values."""
    if _needs_static_shapes(values):
        return values.masked_fill(is_row[:, None], 0.0)
    return values.index_fill_(0, is_row.nonzero()[:, 0], 0.0)


def _add_by_row(table: Tensor, rows: Tensor, values: Tensor) -> None:
    if _needs_static_shapes(rows):
        table += _summed_by_row(values, rows, table.shape[0])
    else:
        table.index_add_(0, rows, values)


def _coordinates(right: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the left and of the right table that make the rows ``ids``."""
    right_rows, ids = right.shape[0], ids.long()
    return ids // right_rows, ids % right_rows


def _gathered(left: Tensor, right: Tensor, unique_U: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """``(start, left (u, H, R), right (u, R, K))`` for one chunk of distinct ids after the other."""
    for start in range(0, unique_U.numel(), ROWS_PER_CHUNK):
        row, column = _coordinates(right, unique_U[start : start + ROWS_PER_CHUNK])
        # on a CPU several times as fast as brackets
        yield start, left.index_select(0, row), right.index_select(0, column)


def check_ids(ids: Tensor, num_embeddings: int) -> None:
    """Padded rows exist in the cores but not in the table: an id that reaches one is an error, as in torch.

    Raises:
        IndexError: If there is such an id, or ids are no integers.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise IndexError(f"ids have dtype {ids.dtype}, but rows are named by integers. Pass ids.long(), for example.")
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= num_embeddings:
        raise IndexError(
            f"index out of range in self: ids span [{low}, {high}], the embedding has rows [0, {num_embeddings - 1}]."
        )
