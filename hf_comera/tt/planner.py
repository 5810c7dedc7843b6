"""Which of two paths computes ``y = x W`` for a tensor train W: one rule, and the products that a path is made of.

The cores contract to two halves, ``W = left.T @ right``. The low-rank path is two-sided contraction,
``(x @ left.T) @ right``; the dense path is ``x @ (left.T @ right)``. Inside a half the cores are always multiplied
from the outer end of the train inwards, where ranks are smallest: ``contract_left`` and ``contract_right`` of
``tt/cores.py``.

Source: CoMERA, arXiv:2405.14377, contraction paths.
"""

# Shapes here: N = in features, M = out features, r = middle rank.

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

__all__ = ["RULE", "Product", "half_products", "path_products", "prefers_dense", "total_cost"]

WORTH_DENSE = 1.25
"""Numbers of both halves over those of the matrix, from which on a layer is dense.

At 1 both paths multiply equally often, and a forward pass takes equally long. A training step takes 1.3 times as long
on the dense path, whose gradient goes back into the halves (768 x 768, 4,096 rows, one CPU thread). At 1.33 the dense
path is 1.6 times as fast forward and 1.2 times in training. Of 54 measured cases the rule misses three by more than 1
%: training with 1 to 512 rows at 1.33 (benchmarks/NOTES.md).
"""

RULE = f"dense where r (N + M) > {WORTH_DENSE:g} N M, for N x M features and middle rank r in multiples of 8"


def prefers_dense(in_features: int, out_features: int, rank: int) -> bool:
    """Whether the dense path is taken: :data:`RULE`.

    Neither rows nor device count. So all processes agree, a short last batch is computed like the others, and compiled
    code decides once. One row is no exception: evaluation caches the matrix, which is then faster for any number of
    rows. In training or compiled code the matrix is built for each pass, and with few rows the low-rank path would be
    faster. But a tensor train of such ranks is about as large as the dense matrix: a case to avoid, not to plan for.

    Args:
        in_features: N.
        out_features: M.
        rank: Of the middle bond, as it is computed with: rounded up as the halves are.

    >>> prefers_dense(768, 768, 32), prefers_dense(768, 768, 512)
    (False, True)
    """
    return rank * (in_features + out_features) > WORTH_DENSE * in_features * out_features


class Product(NamedTuple):
    """One matrix product ``(m, k) @ (k, n)``. Its two gradients have the same three sizes, in another order."""

    m: int
    k: int
    n: int
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """Operands read and result written, each once."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.dtype.itemsize


def total_cost(products: Iterable[Product], *, training: bool) -> tuple[int, int]:
    """FLOPs and bytes of ``products``, in training with those of all gradients.

    >>> total_cost([Product(2, 3, 5, torch.float32)], training=False)
    (60, 124)
    """
    products, passes = list(products), 3 if training else 1
    return passes * sum(each.flops for each in products), passes * sum(each.bytes for each in products)


def half_products(factors: Sequence[int], ranks: Sequence[int], dtype: torch.dtype) -> list[Product]:
    """The products that contract the cores of one half, from the outer end inwards.

    Args:
        factors: From the outer end.
        ranks: Likewise, the middle rank last: one a core.
        dtype: In which cores are contracted.
    """
    products, covered = [], factors[0]
    for factor, before, after in zip(factors[1:], ranks, ranks[1:], strict=False):
        products.append(Product(covered, before, factor * after, dtype))
        covered *= factor
    return products


def path_products(dense: bool, sizes: tuple[int, int, int, int], dtype: torch.dtype, *, kept: bool) -> list[Product]:
    """The products of a forward pass from halves that are at hand.

    Args:
        dense: Along which path.
        sizes: Rows of the input, N, r as it is computed with, and M.
        dtype: Of input and halves.
        kept: Whether a dense matrix is at hand too, as in evaluation.
    """
    rows, inputs, rank, outputs = sizes
    if not dense:
        return [Product(rows, inputs, rank, dtype), Product(rows, rank, outputs, dtype)]
    matrix = [] if kept else [Product(inputs, rank, outputs, dtype)]
    return [*matrix, Product(rows, inputs, outputs, dtype)]
