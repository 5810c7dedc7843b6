"""Which contraction computes ``y = x W`` soonest for a train W: two-sided, cut at another bond, or dense.

Every candidate cuts the train at one bond into two parts. Cut between input and output cores, the parts are the
halves: ``(x @ left) @ right`` is the two-sided path, ``x @ (left @ right)`` the dense one. Cut elsewhere, one part
carries input and output factors. In which order the cores of a part are multiplied is decided by dynamic programming
over the intervals of the train, which is exact for any number of cores.

Source: two-sided contraction and its cost: CoMERA, arXiv:2405.14377; order of the products: Godbole, "On efficient
computation of matrix chain products", IEEE Transactions on Computers C-22, 1973.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch

from hf_comera.tt.machine import Machine
from hf_comera.tt.products import Cost, Product, predicted_seconds, total_cost
from hf_comera.tt.shapes import check_ranks

__all__ = ["ContractionPath", "Order", "PathProblem", "candidate_paths", "plan_path"]

Order: TypeAlias = "int | tuple[Order, Order]"
"""One core by its index, or two groups of neighbouring cores that are multiplied."""
Kind: TypeAlias = Literal["two-sided", "split", "dense"]


class PathProblem(NamedTuple):
    """What a path is planned for; the arguments of :func:`plan_path`."""

    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: int
    training: bool
    halves_cached: bool
    machine: Machine
    dtype: torch.dtype
    in_features: int
    out_features: int


@dataclass(frozen=True, kw_only=True)
class ContractionPath:
    """One way to compute ``x @ W``, what it costs and what it is expected to take. Print it."""

    kind: Kind
    bond: int
    """How many cores are on the left of the cut."""
    rest: int
    """Product of the factors between the cut and the middle bond; 1 if the cut is there."""
    left_order: Order
    right_order: Order
    forward: tuple[Product, ...]
    """All products of a forward pass, in order, those included that a cache would save."""
    problem: PathProblem
    seconds: float = 0.0
    """Predicted for :meth:`products`."""
    candidates: tuple[tuple[str, float], ...] = ()
    """Labels and predicted seconds of all candidates, soonest first."""

    @property
    def num_in(self) -> int:
        """How many cores carry input factors."""
        return len(self.problem.in_factors)

    @property
    def label(self) -> str:
        """Its name among the candidates."""
        return f"split at bond {self.bond}" if self.kind == "split" else self.kind

    def products(self, *, training: bool | None = None, halves_cached: bool | None = None) -> tuple[Product, ...]:
        """The products of a forward pass, in training followed by those of the gradients; see :func:`plan_path`.

        Args:
            training: Default: what the path was planned for.
            halves_cached: Likewise.
        """
        training = self.problem.training if training is None else training
        cached = self.problem.halves_cached if halves_cached is None else halves_cached
        forward = _not_cached(self.forward, self.kind, training) if cached else self.forward
        backward = (gradient for product in reversed(forward) for gradient in product.gradients())
        return (*forward, *backward) if training else forward

    def cost(self, *, training: bool | None = None, halves_cached: bool | None = None) -> Cost:
        """Exact multiplications and bytes of :meth:`products`."""
        return total_cost(self.products(training=training, halves_cached=halves_cached))

    def __str__(self) -> str:
        """A table of the products, and the candidates."""
        problem = self.problem
        what = "forward and backward" if problem.training else "forward"
        cache = "cached" if problem.halves_cached else "built from the cores"
        lines = [
            f"{self.label}: ({problem.rows}, {problem.in_features}) -> ({problem.rows}, {problem.out_features}), "
            f"{what}, halves {cache}, {str(problem.dtype).removeprefix('torch.')}",
            f"  {'product':<20} {'m':>8} {'k':>8} {'n':>8} {'multiplications':>17} {'bytes':>15}",
        ]
        for product in self.products():
            cost, sizes = total_cost((product,)), f"{product.m:>8} {product.k:>8} {product.n:>8}"
            lines.append(f"  {product.name:<20} {sizes} {cost.multiplications:>17,} {cost.bytes:>15,}")
        total = self.cost()
        lines.append(f"  {'together':<47} {total.multiplications:>17,} {total.bytes:>15,}")
        lines.append(f"  predicted for {problem.machine.name} ({problem.machine.source}):")
        return "\n".join(lines + [f"    {label:<18} {seconds * 1e3:>10.4f} ms" for label, seconds in self.candidates])


def plan_path(
    in_factors: Sequence[int],
    out_factors: Sequence[int],
    ranks: Sequence[int],
    rows: int,
    *,
    training: bool,
    halves_cached: bool,
    machine: Machine,
    dtype: torch.dtype = torch.float32,
    in_features: int | None = None,
    out_features: int | None = None,
) -> ContractionPath:
    """The candidate with the least predicted time; planned once for the same arguments.

    Args:
        in_factors: One per input core.
        out_factors: One per output core.
        ranks: Of the inner bonds, as they are computed with: rounded up where an operator pads.
        rows: Of the input: batch times tokens.
        training: Whether gradients of the input and of all cores are computed as well.
        halves_cached: Whether parts are at hand. Without gradients that is all a path can make of the cores, also the
            dense matrix. In training it is the halves, whose gradients are then all that is computed: a dense matrix
            is built from them, and the parts of another cut from the cores.
        machine: Whose ceilings to reckon with.
        dtype: That of the input; cores are contracted in float32 at least.
        in_features: Columns of the input, where the factors pad; default their product.
        out_features: Likewise for the output.

    Raises:
        ValueError: If a side has no factors, there is not one positive integer rank a bond, or the machine does not
            know the dtype.
    """
    in_factors, out_factors = tuple(in_factors), tuple(out_factors)
    in_features = math.prod(in_factors) if in_features is None else in_features
    out_features = math.prod(out_factors) if out_features is None else out_features
    settings = (rows, training, halves_cached, machine, dtype, in_features, out_features)
    return candidate_paths(PathProblem(in_factors, out_factors, tuple(ranks), *settings))[0]


@functools.lru_cache(maxsize=4096)
def candidate_paths(problem: PathProblem) -> tuple[ContractionPath, ...]:
    """All candidates, soonest first; those that take equally long in the order two-sided, dense, others."""
    if not problem.in_factors or not problem.out_factors:
        raise ValueError(
            f"in_factors={problem.in_factors}, out_factors={problem.out_factors}: both sides need at least one, for "
            "example in_factors=(768,) for an input that is not split."
        )
    check_ranks("ranks", problem.ranks, len(problem.in_factors) + len(problem.out_factors) - 1)
    paths = []
    for path in _candidates(problem):
        needed = _not_cached(path.forward, path.kind, problem.training) if problem.halves_cached else path.forward
        seconds = sum(predicted_seconds(product, problem.machine, problem.training) for product in needed)
        paths.append((seconds, path))
    paths.sort(key=lambda pair: pair[0])
    candidates = tuple((path.label, seconds) for seconds, path in paths)
    return tuple(replace(path, seconds=seconds, candidates=candidates) for seconds, path in paths)


def _not_cached(forward: tuple[Product, ...], kind: Kind, training: bool) -> tuple[Product, ...]:
    if not training:
        return tuple(product for product in forward if product.stage == "apply")
    return forward if kind == "split" else tuple(product for product in forward if product.stage != "parts")


def _candidates(problem: PathProblem) -> Iterator[ContractionPath]:
    num_in, num_cores = len(problem.in_factors), len(problem.in_factors) + len(problem.out_factors)
    factors, rows, inputs = (*problem.in_factors, *problem.out_factors), problem.rows, problem.in_features
    merge = _interval_merger(problem)
    for bond in (num_in, *(bond for bond in range(1, num_cores) if bond != num_in)):
        _, left_order, left_products = merge(0, bond - 1)
        _, right_order, right_products = merge(bond, num_cores - 1)
        rest, rank = math.prod(factors[min(bond, num_in) : max(bond, num_in)]), problem.ranks[bond - 1]
        part_of_x, part_of_y = math.prod(factors[: min(bond, num_in)]), math.prod(factors[max(bond, num_in) :])
        orders = {"bond": bond, "rest": rest, "left_order": left_order, "right_order": right_order}
        apply: Callable[..., Product] = functools.partial(Product, "apply", dtype=problem.dtype)
        parts = (*left_products, *right_products)
        path = functools.partial(ContractionPath, problem=problem, **orders)  # type: ignore[arg-type]
        if bond < num_in:
            last = right_products[-1]  # its factors of the input come first in the part, as in the code
            moved = (*parts[:-1], last._replace(copied=last.m * last.n))
            code = apply("code", rows * rest, part_of_x, rank, copied=rows * part_of_x * rest)
            yield path(kind="split", forward=(*moved, code, apply("y", rows, rest * rank, problem.out_features)))
        elif bond > num_in:
            code = apply("code", rows, inputs, rest * rank)
            yield path(kind="split", forward=(*parts, code, apply("y", rows * rest, rank, part_of_y)))
        else:
            code, y = apply("code", rows, inputs, rank), apply("y", rows, rank, problem.out_features)
            yield path(kind="two-sided", forward=(*parts, code, y))
            matrix = Product("matrix", "matrix", inputs, rank, problem.out_features, problem.dtype)
            yield path(kind="dense", forward=(*parts, matrix, apply("y", rows, inputs, problem.out_features)))


def _interval_merger(problem: PathProblem) -> Callable[[int, int], tuple[float, Order, tuple[Product, ...]]]:
    """A function from the first and the last core of an interval to seconds, order and products of merging it."""
    factors, bonds = (*problem.in_factors, *problem.out_factors), (1, *problem.ranks, 1)
    dtype = torch.promote_types(problem.dtype, torch.float32)

    @functools.cache
    def merge(first: int, last: int) -> tuple[float, Order, tuple[Product, ...]]:
        if first == last:
            return 0.0, first, ()
        found: list[tuple[float, Order, tuple[Product, ...]]] = []
        for middle in range(first + 1, last + 1):
            left, right = merge(first, middle - 1), merge(middle, last)
            rows = bonds[first] * math.prod(factors[first:middle])
            columns = math.prod(factors[middle : last + 1]) * bonds[last + 1]
            name = f"cores {first} to {last}"
            product = Product("parts", name, rows, bonds[middle], columns, dtype)
            seconds = left[0] + right[0] + predicted_seconds(product, problem.machine, problem.training)
            found.append((seconds, (left[1], right[1]), (*left[2], *right[2], product)))
        return min(found, key=lambda each: each[0])

    return merge
