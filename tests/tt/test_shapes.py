"""hf_comera/tt/shapes.py: factors cover their size, stay balanced, and bad ones are named."""

import math

import pytest

from hf_comera.tt.shapes import balanced_factors, check_factors, check_ranks, factorize, useful_ranks


@pytest.mark.parametrize(
    ("size", "num_factors", "expected"),
    [
        (768, 3, (8, 8, 12)),
        (3072, 3, (12, 16, 16)),
        (4096, 4, (8, 8, 8, 8)),
        (7, 3, (1, 1, 7)),
        (1, 2, (1, 1)),
        (12, 1, (12,)),
    ],
)
def test_balanced_factors_are_exact(size, num_factors, expected):
    assert balanced_factors(size, num_factors) == expected


@pytest.mark.parametrize("size", [30522, 50257, 50265, 28996, 32000, 128256, 151936, 241, 768, 11008, 2, 1])
@pytest.mark.parametrize("num_factors", [1, 2, 3, 4, 5])
def test_factorize_covers_every_size_with_little_padding(size, num_factors):
    factors = factorize(size, num_factors)
    assert len(factors) == num_factors
    assert size <= math.prod(factors) <= 1.1 * size


@pytest.mark.parametrize("size", [30522, 50257, 50265])
def test_vocabularies_with_large_primes_get_balanced_factors(size):
    assert max(factorize(size, 4)) <= 1.4 * size**0.25


@pytest.mark.parametrize(
    ("factors", "rank", "expected"),
    [
        ((12, 8, 8, 8, 8, 12), 30, (12, 30, 30, 30, 12)),
        ((12, 8, 8, 12, 16, 16), 30, (12, 30, 30, 30, 16)),
        ((2, 3), 100, (2,)),
        ((1, 5, 1), 4, (1, 1)),
        ((4, 4, 4), (2, 9), (2, 4)),
        ((6,), 3, ()),
    ],
)
def test_useful_ranks_are_clipped_to_what_the_factors_can_use(factors, rank, expected):
    assert useful_ranks(factors, rank) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: check_factors("in_factors", (4, 8, 8), 768),
            r"in_factors=\(4, 8, 8\) multiply to 256.*size 768.*\(8, 8, 12\)",
        ),
        (lambda: check_factors("in_factors", (20, 20, 20), 768), "multiply to 8000"),
        (lambda: check_factors("in_factors", (), 768), "multiply to nothing"),
        (lambda: check_factors("in_factors", (0, 768), 768), "contains 0"),
        (lambda: check_factors("in_factors", (2.0, 384), 768), "contains 2.0"),
        (lambda: check_factors("f", (3, 3), 8, may_pad=False), r"product is 8, for example \(2, 4\)"),
        (lambda: useful_ranks((4, 4), 0), "rank=0 is not a positive integer"),
        (lambda: useful_ranks((4, 4), -3), "rank=-3"),
        (lambda: useful_ranks((4, 4, 4), (2,)), "has 1 entries, but the cores have 2 inner bonds"),
        (lambda: check_ranks("rank_pattern", (2, True), 2), "rank_pattern=True"),
        (lambda: balanced_factors(0, 3), "size=0"),
    ],
)
def test_bad_values_are_named_with_one_that_works(call, message):
    with pytest.raises(ValueError, match=message):
        call()
