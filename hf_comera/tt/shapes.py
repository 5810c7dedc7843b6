"""How a size is split into tensor-train factors, and the largest ranks those factors can use."""

import math
from collections.abc import Sequence

__all__ = ["balanced_factors", "check_factors", "check_ranks", "factorize", "useful_ranks"]

# Default factors pad a size by at most this multiple, and factors that a user gives by at most the second.
MAX_PADDING = 1.10
MAX_GIVEN_PADDING = 1.25
# Exact factors are kept while their sum (which core sizes follow) is at most this multiple of the best padded sum.
EXACT_SUM_TOLERANCE = 1.25


def balanced_factors(size: int, num_factors: int) -> tuple[int, ...]:
    """Split ``size`` exactly into ``num_factors`` factors, as equal as its divisors allow, smallest first.

    >>> balanced_factors(768, 3)
    (8, 8, 12)
    >>> balanced_factors(3072, 3)
    (12, 16, 16)
    >>> balanced_factors(7, 2)
    (1, 7)
    """
    if size < 1 or num_factors < 1:
        raise ValueError(f"size={size}, num_factors={num_factors}: both must be at least 1, for example (768, 3).")
    return min(_factorizations(size, num_factors, 1), key=lambda factors: (sum(factors), factors[-1]))


def _factorizations(size: int, num_factors: int, smallest: int) -> list[tuple[int, ...]]:
    """All non-decreasing splits of ``size`` with factors of at least ``smallest`` (at least one: 1, ..., 1, size)."""
    if num_factors == 1:
        return [(size,)]
    found = []
    for factor in range(smallest, int(size ** (1 / num_factors) + 1e-9) + 1):
        if size % factor == 0:
            rest = _factorizations(size // factor, num_factors - 1, factor)
            found += [(factor, *others) for others in rest]
    return found


def factorize(size: int, num_factors: int) -> tuple[int, ...]:
    """Factors whose product is ``size``, or a little more where ``size`` has no balanced factors.

    Padding costs nothing but a few unused rows: 30522 = 2 * 3 * 5087 would need a core with a factor of 5087.

    >>> factorize(768, 3)
    (8, 8, 12)
    >>> import math
    >>> factors = factorize(30522, 4)
    >>> 30522 <= math.prod(factors) < 1.1 * 30522 and max(factors) <= 16
    True
    """
    exact = balanced_factors(size, num_factors)
    ideal_sum = num_factors * size ** (1 / num_factors)
    if sum(exact) <= EXACT_SUM_TOLERANCE * ideal_sum:
        return exact
    padded = _padded_factors(size, num_factors)
    return exact if sum(exact) <= EXACT_SUM_TOLERANCE * sum(padded) else padded


def _padded_factors(size: int, num_factors: int) -> tuple[int, ...]:
    """The non-decreasing factors with the smallest sum, then the smallest product, that cover ``size``."""
    low = max(1, int(size ** (1 / num_factors) * 0.75))
    high = math.ceil(size ** (1 / num_factors) * 1.35) + 1
    candidates: list[tuple[int, ...]] = []

    def extend(prefix: tuple[int, ...], product: int) -> None:
        if len(prefix) == num_factors - 1:
            last = max(prefix[-1] if prefix else 1, math.ceil(size / product))
            if last <= high and product * last <= MAX_PADDING * size:
                candidates.append((*prefix, last))
            return
        for factor in range(prefix[-1] if prefix else low, high + 1):
            extend((*prefix, factor), product * factor)

    extend((), 1)
    if not candidates:
        return balanced_factors(size, num_factors)
    return min(candidates, key=lambda factors: (sum(factors) + 4 * math.prod(factors) / size, math.prod(factors)))


def useful_ranks(factors: Sequence[int], rank: int | Sequence[int]) -> tuple[int, ...]:
    """Ranks of the inner bonds, clipped to the largest that can matter: min(left product, right product).

    Args:
        factors: The sizes of all cores in order (of a TTM core: row factor times column factor).
        rank: One wanted rank for every bond, or one per inner bond; only zeros for a layer without ranks.

    Returns:
        ``len(factors) - 1`` ranks.

    >>> useful_ranks((12, 8, 8, 8, 8, 12), 30)
    (12, 30, 30, 30, 12)
    """
    num_bonds = len(factors) - 1
    wanted = (rank,) * num_bonds if isinstance(rank, int) else tuple(rank)
    if not isinstance(rank, int) and not any(wanted) and len(wanted) == num_bonds:
        return (0,) * num_bonds  # a layer that rank pruning has removed
    check_ranks("rank", wanted, num_bonds)
    return tuple(min(wanted[k], math.prod(factors[: k + 1]), math.prod(factors[k + 1 :])) for k in range(num_bonds))


def check_ranks(name: str, ranks: Sequence[int], num_bonds: int) -> None:
    """Raise ``ValueError`` unless there is one positive rank for each of ``num_bonds`` bonds."""
    if len(ranks) != num_bonds:
        raise ValueError(
            f"{name}={tuple(ranks)} has {len(ranks)} entries, but the cores have {num_bonds} inner bonds. "
            f"Give one rank for all bonds, for example {name}=30, or {num_bonds} of them."
        )
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"{name}={rank!r} is not a positive integer. Use at least 1, for example {name}=30.")


def check_factors(name: str, factors: Sequence[int], size: int, *, may_pad: bool = True) -> None:
    """Raise ``ValueError`` unless ``factors`` are positive and multiply to ``size`` (or to more, if ``may_pad``).

    Args:
        name: The setting to blame.
        factors: The factors given.
        size: The size of the layer.
        may_pad: Whether a larger product is taken as padding.
    """
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            raise ValueError(
                f"{name}={tuple(factors)} contains {factor!r}; use positive integers like "
                f"{_example_factors(size, len(factors), may_pad)}."
            )
    product = math.prod(factors)
    if not factors or not size <= product <= size * (MAX_GIVEN_PADDING if may_pad else 1):
        example = _example_factors(size, len(factors), may_pad)
        needed = f"{size}, or up to {int(size * MAX_GIVEN_PADDING)} with padding" if may_pad else f"{size}"
        raise ValueError(
            f"{name}={tuple(factors)} multiply to {product if factors else 'nothing'}, but the layer has size {size}. "
            f"Use factors whose product is {needed}, for example {example}."
        )


def _example_factors(size: int, num_factors: int, may_pad: bool) -> tuple[int, ...]:
    """Factors that would do; a long list of wrong ones gets a short example, which takes no time to find."""
    number = min(max(num_factors, 1), 6)
    return factorize(size, number) if may_pad else balanced_factors(size, number)
