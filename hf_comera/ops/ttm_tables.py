"""The two half tables of a TTM embedding, and the way back from their gradients to the cores.

An embedding row splits into ``row = left_table[a] @ right_table[b]`` with ``id = a * (rows of the right table) + b``:
two small tables replace the big one, and both are built by one short chain of products.
"""

# Shapes here: A, B = rows of the left and right table, H, K = hidden factors of the left and right, R = middle rank,
# so that the padded vocabulary is A * B and the padded hidden size H * K.

import math
from typing import NamedTuple

from torch import Tensor

from hf_comera.ops.precision import chain_dtype
from hf_comera.tt.cores import contract_left, contract_left_backward, contract_right, contract_right_backward

__all__ = ["HalfTables", "half_tables", "half_tables_backward"]


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
