"""The two products of a tensor-train-matrix table: looking up rows, and projecting on all, as a tied head does.

An embedding row splits into ``row = left_table[a] @ right_table[b]`` with ``id = a * (rows of the right table) + b``:
two small tables replace the big one, and both are built by one short chain of products.

``hf_comera::ttm_lookup``: two half tables are built, each distinct id is contracted once, and its row is copied to all
its places. Only the ids are saved for backward: everything else is cheap to build again.

The number of distinct ids is known on the device only. On a GPU, reading it would make the host wait and could not be
part of a CUDA graph. There every place is contracted by itself, or every row of the table once, if the table has no
more rows than there are places. Gradients are added up in a fixed order in both forms.

Rows from half tables and the gradients of these are operators of their own, for which there are CUDA kernels; their
bodies in plain torch are the reference. The half tables themselves are always products in torch.

``hf_comera::ttm_project``: the table is never whole in memory. Few tokens go through the half tables one after the
other; many tokens use slices of the table, each rebuilt from the half tables, used and dropped. The backward always
works on slices.

Source: CoMERA, arXiv:2405.14377, optimised embedding lookup (unique rows, half tables). Doing both levels by default,
with an own backward, is ours.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.cuda import ttm_embedding as kernels
from hf_comera.ops.cuda.dispatch import register_cuda_kernel
from hf_comera.ops.precision import autocast_input, chain_dtype, without_autocast
from hf_comera.tt.cores import contract_left, contract_left_backward, contract_right, contract_right_backward

__all__ = [
    "HalfTables",
    "check_ids",
    "half_tables",
    "half_tables_backward",
    "look_up_in_tables",
    "project_on_tables",
    "ttm_lookup",
    "ttm_project",
]

# Shapes here: A, B = rows of the left and right table, H, K = hidden factors of the left and right, R = middle rank.
# The padded vocabulary is A * B and the padded hidden size H * K.


class HalfTables(NamedTuple):
    """Tables with ``row(a, b) = left[a] @ right[b]``, and what their backward needs."""

    left: Tensor
    """``left_AHR``."""
    right: Tensor
    """``right_BRK``."""
    cores: list[Tensor]
    prefixes: list[Tensor]
    suffixes: list[Tensor]
    split: int


def half_tables(cores: list[Tensor]) -> HalfTables:
    """Contract TTM cores ``(r_{k-1}, v_k, h_k, r_k)`` to the two half tables, in float32 or better."""
    dtype = chain_dtype(cores[0])
    split = _split(cores)
    flat = [core.to(dtype).reshape(core.shape[0], -1, core.shape[3]) for core in cores]
    prefixes = contract_left(flat[:split])
    left_axes = [size for core in cores[:split] for size in core.shape[1:3]]
    rank = cores[split - 1].shape[3]
    left = _separate(prefixes[-1].reshape(*left_axes, rank), split)
    left_AHR = left.reshape(math.prod(left_axes[::2]), math.prod(left_axes[1::2]), rank)
    if split == len(cores):
        return HalfTables(left_AHR, left_AHR.new_ones(1, rank, 1), flat, prefixes, [], split)
    suffixes = contract_right(flat[split:])
    right_axes = [size for core in cores[split:] for size in core.shape[1:3]]
    right = _separate(suffixes[0].T.reshape(*right_axes, rank), len(cores) - split)
    right_BRK = right.reshape(math.prod(right_axes[::2]), math.prod(right_axes[1::2]), rank).transpose(1, 2)
    return HalfTables(left_AHR, right_BRK.contiguous(), flat, prefixes, suffixes, split)


def half_tables_backward(
    tables: HalfTables, grad_left: Tensor, grad_right: Tensor, cores: list[Tensor]
) -> list[Tensor]:
    """Gradients of the cores from those of ``left_AHR`` and ``right_BRK``, each in its core's shape and dtype."""
    split, rank = tables.split, grad_left.shape[-1]
    grad_half = _interleave(grad_left, cores[:split]).reshape(-1, rank)
    grads = contract_left_backward(tables.cores[:split], tables.prefixes[:-1], grad_half)
    if split < len(cores):
        grad_half = _interleave(grad_right.transpose(1, 2), cores[split:]).reshape(-1, rank).T
        grads += contract_right_backward(tables.cores[split:], tables.suffixes[1:], grad_half)
    return [grad.reshape(core.shape).to(core.dtype) for grad, core in zip(grads, cores, strict=True)]


def _split(cores: list[Tensor]) -> int:
    """How many cores go to the left table: the split with the fewest table entries."""
    if len(cores) == 1:
        return 1

    def entries(split: int) -> int:
        left = math.prod([size for core in cores[:split] for size in core.shape[1:3]])
        right = math.prod([size for core in cores[split:] for size in core.shape[1:3]])
        return (left + right) * cores[split].shape[0]

    costs = [entries(split) for split in range(1, len(cores))]
    return 1 + costs.index(min(costs))  # dynamo traces neither a key of min nor a generator


def _separate(table: Tensor, order: int) -> Tensor:
    """``(v_1, h_1, v_2, h_2, ..., r) -> (v_1, v_2, ..., h_1, h_2, ..., r)``."""
    return table.permute(*range(0, 2 * order, 2), *range(1, 2 * order, 2), 2 * order)


def _interleave(table: Tensor, cores: list[Tensor]) -> Tensor:
    """``(prod v, prod h, r) -> (v_1, h_1, v_2, h_2, ..., r)``."""
    order = len(cores)
    axes = [core.shape[1] for core in cores] + [core.shape[2] for core in cores]
    pairs = [axis for k in range(order) for axis in (k, order + k)]
    return table.reshape(*axes, table.shape[-1]).permute(*pairs, 2 * order)


# Shapes here: V = vocabulary, E = embedding size, U = distinct ids, and those of ops/ttm_embedding.py.


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


def _save_for_lookup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, cores, ctx.num_embeddings, _, ctx.padding_idx = inputs
    ctx.save_for_backward(ids, *cores)


def _lookup_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    ids, *cores = ctx.saved_tensors
    with without_autocast(grad):
        grads = _ttm_lookup_backward(grad, ids, cores, ctx.num_embeddings, ctx.padding_idx)
        return None, grads, None, None, None


_ttm_lookup.register_autograd(_lookup_backward, setup_context=_save_for_lookup)


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


# Shapes here: T = tokens, V = vocabulary, E = embedding size, and those of ops/ttm_embedding.py.


# Entries of the table that are rebuilt at once (4 MB in float32): large enough for full-speed products.
SLICE_ENTRIES = 1 << 20
# Entries of the intermediate at once where tokens go through the half tables.
CHUNK_ENTRIES = 1 << 22


def ttm_project(x: Tensor, cores: list[Tensor], num_embeddings: int, bias: Tensor | None = None) -> Tensor:
    """``x @ table.T + bias`` for the table that the cores stand for.

    Args:
        x: Hidden states. Under autocast they are cast first, as ``torch.nn.functional.linear`` does.
        cores: ``(r_{k-1}, v_k, h_k, r_k)``, as in :func:`hf_comera.ops.ttm_embedding`.
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


def _save_for_project(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cores, bias, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, *cores)


def _project_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *cores = ctx.saved_tensors
    dbias = None
    if ctx.bias_dtype is not None:
        dbias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    with without_autocast(x):
        dx, dcores = _ttm_project_backward(grad, x, cores)
    return dx, dcores, dbias, None


_ttm_project.register_autograd(_project_backward, setup_context=_save_for_project)


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
