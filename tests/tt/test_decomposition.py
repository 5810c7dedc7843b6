"""hf_comera/tt/decomposition.py: TT-SVD is exact at full rank, near the best below, deterministic and fast."""

import math
import time

import pytest
import torch

from hf_comera.tt import decomposition
from hf_comera.tt.decomposition import low_rank_factors, relative_error, tt_svd, ttm_svd
from hf_comera.tt.shapes import useful_ranks
from tests.dense_references import dense_matrix, dense_table

MATRICES = [  # (in_factors, out_factors, in_features, out_features)
    ((4, 6), (6, 4), 24, 24),
    ((5, 4, 2), (3, 4, 3), 40, 36),
    ((3, 3), (3, 4), 7, 11),
    ((6,), (5,), 6, 5),
]


def tt_error(matrix, in_factors, out_factors, rank):
    factors = (*in_factors, *out_factors)
    cores = tt_svd(matrix, in_factors, out_factors, useful_ranks(factors, rank))
    return relative_error(dense_matrix(cores, len(in_factors), *matrix.shape), matrix), cores


@pytest.mark.parametrize(("in_factors", "out_factors", "rows", "columns"), MATRICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_full_rank_is_exact(in_factors, out_factors, rows, columns, dtype):
    matrix = torch.randn(rows, columns).to(dtype)
    error, cores = tt_error(matrix, in_factors, out_factors, 10_000)
    assert error < (1e-13 if dtype == torch.float64 else 1e-5)
    assert all(core.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) for core in cores)


@pytest.mark.parametrize("path", ["gram-of-rows", "gram-of-columns", "random-range"])
def test_every_route_to_a_basis_is_near_the_best_rank_r_matrix(path, monkeypatch):
    matrix = torch.randn(60, 12) @ torch.diag(0.5 ** torch.arange(12.0)) @ torch.randn(12, 40)
    monkeypatch.setattr(
        decomposition, "GRAM_LIMIT", {"gram-of-rows": 60, "gram-of-columns": 40, "random-range": 1}[path]
    )
    error, _ = tt_error(matrix, (60,), (40,), 5)
    values = torch.linalg.svdvals(matrix.double())
    best = (values[5:].square().sum() / values.square().sum()).sqrt().item()
    assert best <= error + 1e-6
    assert error < 1.02 * best


def test_a_matrix_of_low_tt_rank_is_found_again():
    factors, ranks = (4, 6, 6, 4), (3, 2, 3)
    bonds = (1, *ranks, 1)
    cores = [torch.randn(bonds[k], factors[k], bonds[k + 1]) for k in range(4)]
    assert tt_error(dense_matrix(cores, 2, 24, 24), (4, 6), (6, 4), 3)[0] < 1e-5


@pytest.mark.parametrize(("v", "h", "rows", "columns"), [((3, 4, 5), (2, 3, 2), 57, 11), ((6,), (5,), 6, 5)])
def test_tables_at_full_rank_are_exact(v, h, rows, columns):
    table = torch.randn(rows, columns)
    cores = ttm_svd(table, v, h, useful_ranks([a * b for a, b in zip(v, h, strict=True)], 10_000))
    assert relative_error(dense_table(cores, rows, columns), table) < 1e-5


def test_cores_have_one_size_and_do_not_depend_on_the_global_seed():
    matrix = torch.randn(24, 24)
    _, first = tt_error(matrix, (4, 6), (6, 4), 3)
    torch.manual_seed(99)
    _, second = tt_error(matrix, (4, 6), (6, 4), 3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    sizes = [core.square().mean().sqrt().item() for core in first]
    assert max(sizes) == pytest.approx(min(sizes), rel=1e-4)


@pytest.mark.parametrize("limit", [768, 1], ids=["gram", "random-range"])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(61, 13, 5), (13, 61, 13), (40, 40, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_two_factors_are_the_nearest_to_a_matrix_with_weighted_rows(rows, columns, rank, weighted, limit, monkeypatch):
    monkeypatch.setattr(decomposition, "GRAM_LIMIT", limit)
    matrix = torch.randn(rows, columns, dtype=torch.float64) * 0.5 ** torch.arange(columns)
    weights = torch.randint(0, 5, (rows,)) if weighted else torch.ones(rows)
    first, second = low_rank_factors(matrix, rank, weights if weighted else None)
    assert (first.shape, second.shape) == ((rows, rank), (rank, columns))
    torch.testing.assert_close(second @ second.T, torch.eye(rank, dtype=torch.float64))
    error = (weights.sqrt()[:, None] * (first @ second - matrix)).norm().item()
    left = torch.linalg.svdvals(weights.sqrt()[:, None] * matrix)[rank:].norm().item()
    assert error == pytest.approx(left, rel=1e-3, abs=1e-6)


def test_zero_matrix_and_error_of_zero():
    error, cores = tt_error(torch.zeros(24, 24), (4, 6), (6, 4), 3)
    assert error == 0.0
    assert all(core.isfinite().all() for core in cores)


def test_a_bert_embedding_takes_seconds():
    """Not a benchmark: a full SVD of this table takes over a minute, the bound is generous for a busy machine."""
    table = torch.randn(30522, 768)
    v, h = (16, 20, 10, 10), (4, 4, 8, 6)
    start = time.perf_counter()
    cores = ttm_svd(table, v, h, useful_ranks([a * b for a, b in zip(v, h, strict=True)], 32))
    assert time.perf_counter() - start < 30.0
    assert math.prod(core.shape[1] for core in cores) == 32_000
