"""The operator ``hf_comera::ttm_project``: logits of a head that is tied to a TTM embedding, ``x @ table.T + bias``.

The table is never whole in memory. Few tokens go through the half tables one after the other; many tokens use slices
of the table, each rebuilt from the half tables, used and dropped. The backward always works on slices.

The plain-torch body below is the reference and the path of every device without a kernel.
"""

# Shapes here: T = tokens, V = vocabulary, E = embedding size, and those of ops/ttm_tables.py.

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.precision import autocast_input, without_autocast
from hf_comera.ops.ttm_tables import HalfTables, half_tables, half_tables_backward

__all__ = ["project_on_tables", "ttm_project"]

# Entries of the table that are rebuilt at once (4 MB in float32): large enough for full-speed products.
SLICE_ENTRIES = 1 << 20
# Entries of the intermediate at once where tokens go through the half tables.
CHUNK_ENTRIES = 1 << 22


def ttm_project(x: Tensor, cores: list[Tensor], num_embeddings: int, bias: Tensor | None = None) -> Tensor:
    """``x @ table.T + bias`` for the table that the cores stand for.

    Args:
        x: Hidden states. Under autocast they are cast first, as ``torch.nn.functional.linear`` does.
        cores: ``(r_{k-1}, v_k, h_k, r_k)``, as in :func:`hf_comera.ops.ttm_lookup`.
        num_embeddings: Vocabulary: the logits of padding rows are cut.
        bias: ``(num_embeddings,)`` or None.

    Shape:
        ``(..., embedding_dim) -> (..., num_embeddings)``, in the dtype of ``x`` (of autocast, where it is on).
    """
    x = autocast_input(x)
    with without_autocast(x):
        return _ttm_project(x, cores, bias, num_embeddings)


@torch.library.custom_op("hf_comera::ttm_project", mutates_args=())
def _ttm_project(x: Tensor, cores: list[Tensor], bias: Tensor | None, num_embeddings: int) -> Tensor:
    return project_on_tables(x, half_tables(cores), num_embeddings, bias)


def project_on_tables(x: Tensor, tables: HalfTables, num_embeddings: int, bias: Tensor | None = None) -> Tensor:
    """``x @ table.T + bias``, without a gradient, from half tables that are at hand.

    Shape:
        ``(..., embedding_dim) -> (..., num_embeddings)``, in the dtype of ``x``.
    """
    x_TE = x.reshape(-1, x.shape[-1])
    logits_TV = x.new_empty(x_TE.shape[0], num_embeddings)
    project = _through_halves if _halves_are_cheaper(tables, x_TE.shape[0], num_embeddings) else _through_slices
    project(tables, x_TE, logits_TV)
    if bias is not None:
        logits_TV += bias.to(x.dtype)
    # models scale logits in place, which autograd forbids for views that an operator returns
    return torch.ops.aten._unsafe_view(logits_TV, [*x.shape[:-1], num_embeddings])


@_ttm_project.register_fake
def _(x: Tensor, cores: list[Tensor], bias: Tensor | None, num_embeddings: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_embeddings)


@torch.library.custom_op("hf_comera::ttm_project_backward", mutates_args=())
def _ttm_project_backward(grad: Tensor, x: Tensor, cores: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    tables = half_tables(cores)
    dlogits_TV = grad.reshape(-1, grad.shape[-1]).to(x.dtype)
    dx_TE, dleft, dright = _slice_gradients(tables, x.reshape(-1, x.shape[-1]), dlogits_TV)
    return dx_TE.view(x.shape), half_tables_backward(tables, dleft, dright, cores)


@_ttm_project_backward.register_fake
def _(grad: Tensor, x: Tensor, cores: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return x.new_empty(x.shape), [torch.empty_like(core) for core in cores]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cores, bias, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, *cores)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *cores = ctx.saved_tensors
    dbias = None
    if ctx.bias_dtype is not None:
        dbias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    with without_autocast(x):
        dx, dcores = _ttm_project_backward(grad, x, cores)
    return dx, dcores, dbias, None


_ttm_project.register_autograd(_backward, setup_context=_save)


def _halves_are_cheaper(tables: HalfTables, num_tokens: int, num_embeddings: int) -> bool:
    """Compare multiplications: per token through the halves, against rebuilding the table once and a dense product."""
    left_rows, left_hidden, rank = tables.left.shape
    right_rows, _, right_hidden = tables.right.shape
    hidden = left_hidden * right_hidden
    through_halves = num_tokens * rank * (hidden * right_rows + left_rows * right_rows * left_hidden)
    through_slices = num_tokens * num_embeddings * hidden + num_embeddings * hidden * rank
    return through_halves < through_slices


def _through_halves(tables: HalfTables, x_TE: Tensor, logits_TV: Tensor) -> None:
    """``logits[t, (a, b)] = sum_{h, r} left[a, h, r] * (sum_k x[t, h, k] right[b, r, k])``."""
    left_AHR, right_BRK = tables.left.to(x_TE.dtype), tables.right.to(x_TE.dtype)
    (left_rows, left_hidden, rank), (right_rows, _, right_hidden) = left_AHR.shape, right_BRK.shape
    chunk = max(1, CHUNK_ENTRIES // (left_hidden * rank * right_rows))
    from_right = right_BRK.permute(2, 1, 0).reshape(right_hidden, rank * right_rows)
    into_left = left_AHR.reshape(left_rows, left_hidden * rank)
    for start in range(0, x_TE.shape[0], chunk):
        part = pad(x_TE[start : start + chunk], (0, left_hidden * right_hidden - x_TE.shape[1]))
        middle = part.reshape(-1, right_hidden) @ from_right
        product = torch.matmul(into_left, middle.view(part.shape[0], left_hidden * rank, right_rows))
        logits_TV[start : start + chunk] = product.flatten(1)[:, : logits_TV.shape[1]]


def _through_slices(tables: HalfTables, x_TE: Tensor, logits_TV: Tensor) -> None:
    for first, last, _, rows_VE in _table_slices(tables, logits_TV.shape[1], x_TE.shape[1]):
        logits_TV[:, first:last] = x_TE @ rows_VE.to(x_TE.dtype).T


def _slice_gradients(tables: HalfTables, x_TE: Tensor, dlogits_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of both half tables, one slice of the table at a time."""
    dx_TE = tables.left.new_zeros(x_TE.shape)  # contiguous, whatever the strides of x
    dleft, dright = torch.zeros_like(tables.left), torch.zeros_like(tables.right)
    right_rows, _, right_hidden = dright.shape
    right_flat = tables.right.permute(0, 2, 1).reshape(right_rows * right_hidden, -1)
    for first, last, left_slice, rows_VE in _table_slices(tables, dlogits_TV.shape[1], x_TE.shape[1]):
        part = dlogits_TV[:, first:last]
        dx_TE += part @ rows_VE.to(x_TE.dtype)
        drows = (part.T @ x_TE).to(dleft.dtype)
        left = tables.left[left_slice]
        missing = (0, left.shape[1] * right_hidden - drows.shape[1], 0, left.shape[0] * right_rows - drows.shape[0])
        # (a, b, h, k) -> (a, h, b, k), the layout in which both table gradients are plain products
        drows = pad(drows, missing).view(left.shape[0], right_rows, left.shape[1], right_hidden).transpose(1, 2)
        drows = drows.reshape(left.shape[0] * left.shape[1], -1)
        dleft[left_slice] = (drows @ right_flat).view(left.shape)
        from_left = left.reshape(-1, left.shape[2]).T @ drows
        dright += from_left.view(-1, right_rows, right_hidden).transpose(0, 1)
    return dx_TE.to(x_TE.dtype), dleft, dright


def _table_slices(
    tables: HalfTables, num_embeddings: int, embedding_dim: int
) -> Iterator[tuple[int, int, slice, Tensor]]:
    """``(first id, last id, rows of the left table, the table's rows)`` for one slice after the other."""
    left_AHR, right_BRK = tables.left, tables.right
    (left_rows, left_hidden, rank), (right_rows, _, right_hidden) = left_AHR.shape, right_BRK.shape
    step = max(1, SLICE_ENTRIES // (right_rows * left_hidden * right_hidden))
    into_right = right_BRK.permute(1, 0, 2).reshape(rank, right_rows * right_hidden)
    for start in range(0, left_rows, step):
        first = start * right_rows
        if first >= num_embeddings:
            return
        left = left_AHR[start : start + step]
        product = left.reshape(-1, rank) @ into_right
        rows = product.view(left.shape[0], left_hidden, right_rows, right_hidden).transpose(1, 2)
        rows_VE = rows.reshape(left.shape[0] * right_rows, -1)[: num_embeddings - first, :embedding_dim]
        yield first, first + rows_VE.shape[0], slice(start, start + left.shape[0]), rows_VE
