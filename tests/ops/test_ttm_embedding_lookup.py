"""hf_comera/ops/ttm_embedding.py: rows and gradients agree with the dense table; only ids are saved."""

import pytest
import torch
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode

from hf_comera.ops import ttm_lookup
from hf_comera.ops.ttm_embedding import _ttm_lookup, _ttm_rows, _ttm_table_gradients, half_tables
from tests.dense_references import dense_table, random_ttm_cores
from tests.ops.test_low_rank import LargestTensor

TABLES = [  # (v, h, rank, num_embeddings, embedding_dim)
    pytest.param((3, 4, 5), (2, 3, 2), 3, 57, 11, id="three-cores-padded"),
    pytest.param((6,), (5,), 1, 6, 5, id="one-core"),
    pytest.param((3, 4), (2, 2), 2, 11, 4, id="two-cores"),
    pytest.param((2, 3, 2, 3), (2, 1, 2, 2), 3, 35, 8, id="four-cores-factor-one"),
    pytest.param((2, 3, 2), (2, 2, 2), 1, 12, 8, id="rank-one"),
]


@pytest.fixture(params=["as on a CPU", "as on a GPU"], autouse=True)
def form(request, monkeypatch):
    """Both forms of the operator; the static shapes of a GPU are forced on a CPU."""
    if request.param == "as on a GPU":
        monkeypatch.setitem(_ttm_lookup._init_fn.__globals__, "_needs_static_shapes", lambda ids: True)
    return request.param


@pytest.mark.parametrize(("v", "h", "rank", "num_embeddings", "embedding_dim"), TABLES)
@pytest.mark.parametrize("chunk", [8192, 2], ids=["one-chunk", "many-chunks"])
def test_matches_dense_and_passes_gradcheck(v, h, rank, num_embeddings, embedding_dim, chunk, monkeypatch):
    monkeypatch.setitem(_ttm_lookup._init_fn.__globals__, "ROWS_PER_CHUNK", chunk)
    cores = random_ttm_cores(v, h, rank)
    ids = torch.randint(0, num_embeddings, (3, 7))
    ids[0, :3] = ids[1, 0]  # duplicates
    padding_idx = int(ids[2, 2])
    table = dense_table(cores, num_embeddings, embedding_dim)
    rows = ttm_lookup(ids, cores, num_embeddings, embedding_dim, padding_idx)
    torch.testing.assert_close(rows, table[ids])
    grad = torch.randn_like(rows)
    reference = torch.autograd.grad(embedding(ids, table, padding_idx=padding_idx), cores, grad)
    for mine, theirs in zip(torch.autograd.grad(rows, cores, grad), reference, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.autograd.gradcheck(
        lambda *cores: ttm_lookup(ids, list(cores), num_embeddings, embedding_dim), tuple(cores)
    )


class OpNames(TorchDispatchMode):
    """The names of all operations, inside custom operators too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_ids", [5, 200], ids=["fewer than rows", "more than rows"])
def test_static_shapes_read_nothing_and_change_nothing(num_ids, monkeypatch):
    cores, ids = random_ttm_cores((3, 4, 5), (2, 3, 2), 3), torch.randint(0, 57, (num_ids,))
    left, right, *_ = half_tables([core.detach() for core in cores])
    lookup, backward = _ttm_rows._init_fn, _ttm_table_gradients._init_fn  # what the operators do
    results = []
    for static in (False, True):
        monkeypatch.setitem(_ttm_lookup._init_fn.__globals__, "_needs_static_shapes", lambda _, static=static: static)
        with OpNames() as seen:
            rows = lookup(ids, left, right, 57, 11, left.dtype)
            grads = backward(rows.cos(), ids, left, right, 57, 7)
        results.append([rows, *grads])
        assert any("unique" in name for name in seen.names) != static
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (2, 3, 4)], ids=str)
def test_any_shape_of_ids_also_empty(shape):
    cores = random_ttm_cores((3, 4), (2, 2), 2)
    rows = ttm_lookup(torch.zeros(shape, dtype=torch.long), cores, 11, 4)
    assert rows.shape == (*shape, 4)
    rows.sum().backward()
    assert all(core.grad.isfinite().all() for core in cores)


def test_padding_idx_gets_no_gradient():
    cores = random_ttm_cores((3, 4), (2, 2), 2)
    ttm_lookup(torch.full((5,), 3), cores, 11, 4, padding_idx=3).sum().backward()
    assert all(not core.grad.any() for core in cores)


@pytest.mark.parametrize("bad", [11, -1, 12_000], ids=["first padding row", "negative", "far"])
def test_ids_outside_the_vocabulary_raise_as_in_torch(bad):
    cores = random_ttm_cores((3, 4), (2, 2), 2)
    with pytest.raises(IndexError, match=r"index out of range in self: ids span .* rows \[0, 10\]"):
        ttm_lookup(torch.tensor([1, bad]), cores, 11, 4)


def test_opcheck():
    cores = random_ttm_cores((3, 4), (2, 2), 2)
    ids = torch.tensor([[1, 2], [2, 10]])
    torch.library.opcheck(_ttm_lookup, (ids, cores, 11, 4, 2))
    left, right, *_ = half_tables([core.detach() for core in cores])
    for operator, arguments in (
        (_ttm_rows, (ids, left, right, 11, 4, torch.bfloat16)),
        (_ttm_table_gradients, (torch.randn(2, 2, 4), ids, left, right, 11, 2)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_only_index_vectors_are_saved_and_no_table_is_made():
    cores = random_ttm_cores((10, 10, 10), (4, 4, 4), 3, dtype=torch.float32)
    ids = torch.randint(0, 1000, (4, 50))
    saved = {}
    with (
        LargestTensor() as mode,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t),
    ):
        rows = ttm_lookup(ids, cores, 1000, 64)
        rows.sum().backward()
    parameters = {core.data_ptr() for core in cores}
    assert [t.data_ptr() for t in saved.values() if t.data_ptr() not in parameters] == [ids.data_ptr()]
    assert mode.largest < 1000 * 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_are_the_rounded_rows(dtype):
    cores = [core.detach().to(dtype) for core in random_ttm_cores((3, 4), (2, 2), 2, dtype=torch.float32)]
    exact = dense_table([core.double() for core in cores], 11, 4)
    rows = ttm_lookup(torch.arange(11), cores, 11, 4)
    assert rows.dtype == dtype
    torch.testing.assert_close(rows, exact.to(dtype))


def test_autocast_leaves_rows_in_the_dtype_of_the_cores():
    cores = random_ttm_cores((3, 4), (2, 2), 2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = ttm_lookup(torch.arange(11), cores, 11, 4)
    torch.testing.assert_close(rows, dense_table(cores, 11, 4))
