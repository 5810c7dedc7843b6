"""TTMEmbedding with kernels: rows and gradients for ids of all kinds are those of plain torch."""

import pytest
import torch

from hf_comera.modules import TTMEmbedding
from hf_comera.ops import use_kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
IDS = {
    "duplicates": torch.tensor([[3, 3, 56, 0, 3], [0, 7, 56, 7, 8]]),
    "one": torch.tensor(5),
    "none": torch.zeros(2, 0, dtype=torch.int64),
    "padding-alone": torch.full((4,), 2),
    "int32": torch.tensor([1, 56, 2], dtype=torch.int32),
    "int16": torch.tensor([1, 56, 2], dtype=torch.int16),
    "uint8": torch.tensor([1, 56, 2], dtype=torch.uint8),
    "not-contiguous": torch.arange(12).view(3, 4).T,
}


def make(device, dtype=torch.float32, num_embeddings=57, embedding_dim=11):
    return TTMEmbedding(num_embeddings, embedding_dim, ranks=4, padding_idx=2, device=device, dtype=dtype)


def look_up(embedding, ids):
    """Rows with a gradient, gradients of all cores, and rows from kept tables."""
    torch.manual_seed(1)
    rows = embedding(ids)
    gradients = torch.autograd.grad(rows, embedding.cores(), torch.randn_like(rows))
    with torch.no_grad():
        return [rows, *gradients, embedding(ids), embedding(ids)]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_equal_torch(ids, dtype, gated, served, calls):
    embedding, ids = make(served, dtype), ids.to(served)
    if gated:
        embedding.add_rank_gates()
        for gate in embedding.rank_gates():
            gate.data.uniform_(0.5, 1.5)
    found = look_up(embedding, ids)
    backward = ["ttm_grad_rows", "ttm_table_gradient", "ttm_table_gradient"]
    assert [name for name, _ in calls] == ["ttm_rows", *backward, "ttm_rows", "ttm_rows"]
    use_kernels(False)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, look_up(embedding, ids.long()), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "embedding_dim"), [(torch.float64, 11), (torch.float16, 11), (torch.float32, 9000)], ids=str
)
def test_what_the_kernels_cannot_take_stays_in_torch(dtype, embedding_dim, served, calls):
    embedding, ids = make(served, dtype, embedding_dim=embedding_dim), IDS["duplicates"].to(served)
    found = look_up(embedding, ids)
    assert not calls
    use_kernels(False)
    torch.testing.assert_close(found, look_up(embedding, ids))


def test_ids_that_are_none_are_errors_as_in_torch(served, calls):
    embedding = make(served)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(IndexError, match="rows are named by integers"):
            embedding(torch.ones(2, device=served, dtype=dtype))
    if served.type == "cpu":
        with pytest.raises(IndexError, match="index out of range"):
            embedding(torch.tensor([57]))
    assert not calls
