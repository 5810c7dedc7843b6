"""hf_comera/ops/ttm_embedding.py: logits of a tied head agree with the dense table on every route."""

import sys

import pytest
import torch

from hf_comera.ops import ttm_project
from hf_comera.ops.ttm_embedding import _ttm_project
from tests.dense_references import dense_table, random_ttm_cores
from tests.ops.test_low_rank import LargestTensor
from tests.ops.test_ttm_embedding_lookup import TABLES

module = sys.modules[_ttm_project._init_fn.__module__]


@pytest.mark.parametrize(("v", "h", "rank", "num_embeddings", "embedding_dim"), TABLES)
@pytest.mark.parametrize("through_halves", [True, False])
@pytest.mark.parametrize("entries", [1 << 20, 1], ids=["one-slice", "many-slices"])
def test_every_route_matches_dense(v, h, rank, num_embeddings, embedding_dim, through_halves, entries, monkeypatch):
    monkeypatch.setattr(module, "_halves_are_cheaper", lambda *sizes: through_halves)
    monkeypatch.setattr(module, "SLICE_ENTRIES", entries)
    monkeypatch.setattr(module, "CHUNK_ENTRIES", entries)
    cores = random_ttm_cores(v, h, rank)
    x = torch.randn(2, 3, embedding_dim, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(num_embeddings, dtype=torch.float64, requires_grad=True)
    table = dense_table(cores, num_embeddings, embedding_dim)
    torch.testing.assert_close(ttm_project(x, cores, num_embeddings, bias), x @ table.T + bias)
    torch.testing.assert_close(ttm_project(x, cores, num_embeddings), x @ table.T)


@pytest.mark.parametrize(("v", "h", "rank", "num_embeddings", "embedding_dim"), TABLES)
@pytest.mark.parametrize("entries", [1 << 20, 1], ids=["one-slice", "many-slices"])
def test_gradcheck(v, h, rank, num_embeddings, embedding_dim, entries, monkeypatch):
    monkeypatch.setattr(module, "SLICE_ENTRIES", entries)
    cores = random_ttm_cores(v, h, rank)
    x = torch.randn(3, embedding_dim, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(num_embeddings, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, bias, *cores: ttm_project(x, list(cores), num_embeddings, bias), (x, bias, *cores)
    )


def test_few_tokens_go_through_the_halves_and_many_through_slices():
    cores = random_ttm_cores((16, 20, 10, 10), (4, 4, 8, 6), 32, dtype=torch.float32)
    tables = module.half_tables(cores)
    assert module._halves_are_cheaper(tables, 1, 30522)
    wide = random_ttm_cores((16, 20, 10, 10), (4, 4, 8, 6), 64, dtype=torch.float32)
    assert not module._halves_are_cheaper(module.half_tables(wide), 4096, 30522)


def test_opcheck():
    cores = random_ttm_cores((3, 4), (2, 2), 2)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(_ttm_project, (x, cores, torch.randn(11, dtype=torch.float64), 11))


def test_strided_input():
    cores = random_ttm_cores((3, 4), (2, 2), 2)
    x = torch.randn(4, 3, 5, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    y = ttm_project(x, cores, 11)
    torch.testing.assert_close(y, x @ dense_table(cores, 11, 4).T)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, dense_table(cores, 11, 4).sum(0).expand(5, 3, 4))


def test_empty_batch():
    cores = random_ttm_cores((3, 4), (2, 2), 2)
    assert ttm_project(torch.randn(2, 0, 4, dtype=torch.float64), cores, 11).shape == (2, 0, 11)


def test_the_whole_table_is_never_made(monkeypatch):
    monkeypatch.setattr(module, "SLICE_ENTRIES", 1 << 12)
    cores = random_ttm_cores((10, 10, 10), (4, 4, 4), 3, dtype=torch.float32)
    x = torch.randn(2, 64, requires_grad=True)
    with LargestTensor() as mode:
        ttm_project(x, cores, 1000).sum().backward()
    assert 0 < mode.largest < 1000 * 64 / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_error_is_at_most_twice_that_of_plain_torch(dtype):
    cores = random_ttm_cores((6, 6, 6), (4, 3, 4), 4, dtype=torch.float32)
    x = torch.randn(32, 48)
    table = dense_table([core.detach() for core in cores], 211, 48)
    exact = x.double() @ table.double().T
    with torch.autocast("cpu", dtype=dtype):
        ours, plain = ttm_project(x, cores, 211), torch.nn.functional.linear(x, table)
    assert ours.dtype == dtype
    assert (ours.double() - exact).norm() <= 2 * (plain.double() - exact).norm()
