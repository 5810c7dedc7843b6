"""kernels/ttm_lookup.cu: rows and gradients of the half tables are those of plain torch on distinct ids."""

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hf_comera.ops.cuda.ttm_embedding import lookup_refusal, ttm_rows, ttm_table_gradients
from tests.kernels.kernel_errors import assert_as_exact, between_nans

# rows and columns of the left table, rank, rows and columns of the right table, vocabulary, embedding size, ids
TABLES = [
    pytest.param(4, 16, 32, 5, 48, 20, 768, 60, id="bert-sized-rows"),
    pytest.param(7, 5, 6, 9, 7, 60, 33, 41, id="odd-and-padded"),
    pytest.param(1, 1, 1, 6, 3, 6, 3, 5, id="one-row-left"),
    pytest.param(12, 6, 3, 1, 1, 11, 6, 30, id="one-core"),
    pytest.param(3, 40, 20, 4, 150, 12, 6000, 9, id="several-parts-of-a-table-row"),
    pytest.param(20, 2, 4, 30, 2, 600, 4, 0, id="no-ids"),
]
PRECISIONS = (torch.float32, torch.float64)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def make_tables(sizes, device):
    a, h, r, b, k = sizes
    return torch.randn(a, h, r, device=device), torch.randn(b, r, k, device=device)


def dense(left, right, num_embeddings, embedding_dim):
    rows = torch.einsum("ahr,brk->abhk", left, right)
    return rows.flatten(2).flatten(0, 1)[:num_embeddings, :embedding_dim]


def some_ids(num_embeddings, num_ids, device):
    """Many duplicates, as words have."""
    return (torch.rand(num_ids).pow(3) * num_embeddings).long().to(device)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize(("a", "h", "r", "b", "k", "num_embeddings", "embedding_dim", "num_ids"), TABLES)
def test_rows(a, h, r, b, k, num_embeddings, embedding_dim, num_ids, dtype, kernels):
    left, right = make_tables((a, h, r, b, k), kernels)
    ids = some_ids(num_embeddings, num_ids, kernels)
    found = ttm_rows(ids, between_nans(left), between_nans(right), num_embeddings, embedding_dim, dtype)
    plain = dense(left, right, num_embeddings, embedding_dim)[ids].to(dtype)
    exact = dense(left.double(), right.double(), num_embeddings, embedding_dim)[ids]
    assert found.dtype == dtype
    assert_as_exact(NAMES[dtype], found, plain, exact)


def gradients(sizes, num_embeddings, embedding_dim, num_ids, with_padding, dtype, device):
    """Both tables' gradients as one vector: of the kernel, of plain torch and in float64."""
    left, right = make_tables(sizes, device)
    ids = some_ids(num_embeddings, num_ids, device)
    padding_idx = int(ids[0]) if with_padding and num_ids else None
    grad = torch.randn(num_ids, embedding_dim, device=device).to(dtype)
    found = ttm_table_gradients(between_nans(grad), ids, left, right, num_embeddings, padding_idx)
    assert [each.shape for each in found] == [left.shape, right.shape]

    references = [plain_gradients(grad, ids, left, right, num_embeddings, padding_idx, each) for each in PRECISIONS]
    return [torch.cat([each.flatten() for each in pair]) for pair in (found, *references)]


def plain_gradients(grad, ids, left, right, num_embeddings, padding_idx, precision):
    """Both tables' gradients through the dense table."""
    tables = [table.to(precision).requires_grad_() for table in (left, right)]
    table = dense(*tables, num_embeddings, grad.shape[-1])
    rows = torch.nn.functional.embedding(ids, table, padding_idx=padding_idx)
    return torch.autograd.grad(rows, tables, grad.to(precision))


@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize(("a", "h", "r", "b", "k", "num_embeddings", "embedding_dim", "num_ids"), TABLES)
def test_gradients(a, h, r, b, k, num_embeddings, embedding_dim, num_ids, with_padding, dtype, kernels):
    sizes = (a, h, r, b, k)
    num_draws = 1 if embedding_dim > 10 else 16  # errors of a few numbers are more chance than anything
    draws = [
        gradients(sizes, num_embeddings, embedding_dim, num_ids, with_padding, dtype, kernels)
        for _ in range(num_draws)
    ]
    assert_as_exact("fp32", *[torch.cat(parts) for parts in zip(*draws, strict=True)])


# how often which ids stand among others; a block sums 32 places, a thread reads the sums of 8 blocks at once
RUNS = {
    "one-id": {3: 700},
    "from-piece-to-piece": {0: 32, 5: 64, 7: 32, 19: 33},
    "begins-and-ends-inside-pieces": {0: 31, 3: 600, 9: 5},
    "one-place-into-the-next-piece": {0: 31, 3: 2, 9: 95},
    "ends-with-the-eighth-piece-after": {0: 20, 3: 12 + 8 * 32, 9: 40},
    "one-more": {0: 20, 3: 12 + 8 * 32 + 1},
    "two-long-ones": {0: 1, 3: 300, 4: 299, 19: 1},
    "half-of-it-padding": {2: 400, 3: 100, 4: 300},
}


@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_gradients_of_ids_that_are_everywhere(runs, dtype, kernels):
    left, right = make_tables((4, 15, 3, 5, 10), kernels)
    ids = torch.tensor([number for number, count in runs.items() for _ in range(count)])
    ids = ids[torch.randperm(len(ids))].to(kernels)
    grad = torch.randn(len(ids), 150, device=kernels).to(dtype)
    found = ttm_table_gradients(between_nans(grad), ids, left, right, 20, padding_idx=2)
    plain, exact = (plain_gradients(grad, ids, left, right, 20, 2, precision) for precision in PRECISIONS)
    assert_as_exact("fp32", *[torch.cat([each.flatten() for each in pair]) for pair in (found, plain, exact)])


def test_a_vocabulary_of_ten_million_costs_nothing(kernels):
    num_embeddings, side = 10_000_000, 3163
    left, right = make_tables((side, 2, 4, side, 2), kernels)
    ids = torch.cat([torch.randint(0, num_embeddings, (40,)), torch.tensor([0, num_embeddings - 1] * 20)]).to(kernels)
    grad = torch.randn(len(ids), 4, device=kernels)
    with LargestTensor() as largest:
        rows = ttm_rows(ids, left, right, num_embeddings, 4, torch.float32)
        found = ttm_table_gradients(grad, ids, left, right, num_embeddings)
    assert largest.numel < 3 * max(left.numel(), right.numel()) < num_embeddings / 100
    tables = [table.double().requires_grad_() for table in (left, right)]
    exact = torch.bmm(tables[0][ids // side], tables[1][ids % side]).flatten(1)
    torch.testing.assert_close(rows, exact.float())
    for one, other in zip(found, torch.autograd.grad(exact, tables, grad.double()), strict=True):
        torch.testing.assert_close(one, other.float())


class LargestTensor(TorchDispatchMode):
    """Entries of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.numel = max(self.numel, result.numel())
        return results


def test_any_axes_of_ids_and_small_integers(kernels):
    left, right = make_tables((3, 4, 5, 6, 7), kernels)
    ids = torch.randint(0, 18, (2, 3, 4), dtype=torch.int32, device=kernels)
    rows = ttm_rows(ids, left, right, 18, 28, torch.float32)
    torch.testing.assert_close(rows, dense(left, right, 18, 28)[ids])
    shaped = ttm_table_gradients(rows, ids, left, right, 18)
    flat = ttm_table_gradients(rows.flatten(0, 2), ids.flatten(), left, right, 18)
    assert all(torch.equal(one, other) for one, other in zip(shaped, flat, strict=True))


def test_ids_outside_the_table_show_in_rows_and_not_in_gradients(kernels):
    left, right = make_tables((3, 4, 5, 6, 7), kernels)
    ids = torch.tensor([0, -1, 17, 16, 400], device=kernels)  # the cores cover 18, the table has 17
    rows = ttm_rows(ids, left, right, 17, 28, torch.float32)
    assert rows.isnan().all(1).tolist() == [False, True, True, False, True]
    grad = torch.randn(5, 28, device=kernels)
    inside = [0, 3]
    for all_ids, good_ids in zip(
        ttm_table_gradients(grad, ids, left, right, 17),
        ttm_table_gradients(grad[inside], ids[inside], left, right, 17),
        strict=True,
    ):
        assert torch.equal(all_ids, good_ids)


def test_the_same_bits_each_time(kernels):
    left, right = make_tables((7, 5, 6, 9, 7), kernels)
    ids, grad = some_ids(60, 200, kernels), torch.randn(200, 33, device=kernels)
    first, again = (ttm_table_gradients(grad, ids, left, right, 60) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


REFUSED = {
    "float64": lambda ids, left, right: (ids, left.double(), right, torch.float32),
    "float16": lambda ids, left, right: (ids, left, right, torch.float16),
    "ranks of the tables differ": lambda ids, left, right: (ids, left, right[:, 1:], torch.float32),
    "ids of an integer dtype, not torch.float32": lambda ids, left, right: (ids.float(), left, right, torch.float32),
    "different devices: cpu, meta": lambda ids, left, right: (ids.to("meta"), left, right, torch.float32),
    "not on meta": lambda *tensors: (*(tensor.to("meta") for tensor in tensors), torch.float32),
    "of up to 8192 numbers with padding, not 8232": lambda ids, left, right: (
        ids,
        left.new_zeros(2, 53, 5),
        right.new_zeros(2, 5, 147),
        torch.float32,
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_says_what_it_cannot_take(words, kernels):
    ids, left, right, dtype = REFUSED[words](torch.zeros(1, dtype=torch.int64), *make_tables((2, 4, 5, 2, 7), "cpu"))
    assert words in lookup_refusal(ids, left, right, dtype)
    with pytest.raises(ValueError, match=words):
        ttm_rows(ids, left, right, 4, 28, dtype)
