"""hf_comera/ops/latent_attention.py: what meets latents gives scores and outputs of dense projections."""

import pytest
import torch

from hf_comera.ops import latent_attention
from hf_comera.ops.latent_attention import absorbed_query, output_latent

SIZES = [  # (batch, tokens, heads, groups, head size, rank of query or context, rank of key or output)
    pytest.param((2, 5, 3, 3, 8, 4, 4), id="square"),
    pytest.param((3, 7, 2, 2, 5, 3, 4), id="odd"),
    pytest.param((1, 1, 4, 4, 16, 9, 8), id="one-token"),
    pytest.param((2, 6, 6, 2, 4, 5, 3), id="groups"),
    pytest.param((2, 3, 4, 1, 6, 2, 7), id="one-group"),
    pytest.param((4, 50, 1, 1, 32, 2, 3), id="one-head"),
    pytest.param((0, 5, 2, 2, 4, 3, 3), id="empty"),
    pytest.param((2, 0, 2, 2, 4, 3, 3), id="no-tokens"),
]
each_size = pytest.mark.parametrize("sizes", SIZES)
each_way = pytest.mark.parametrize("absorbs", [True, False, None], ids=["absorbed", "by-head", "chosen"])


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def by_head(right, heads, size):
    """``(heads, R, size)``, groups repeated."""
    parts = right.view(right.shape[0], -1, size)
    return torch.stack([parts[:, head * parts.shape[1] // heads] for head in range(heads)])


def query_problem(sizes):
    batch, tokens, heads, groups, size, rank, other = sizes
    tensors = random(batch, tokens, rank), random(rank, heads * size), random(other, groups * size)

    def dense(latent, right_q, right_k):
        query = (latent @ right_q).unflatten(-1, (heads, size))
        return torch.einsum("bthd,hrd->bthr", query, by_head(right_k, heads, size))

    return tensors, lambda *tensors: absorbed_query(*tensors, size), dense


def output_problem(sizes):
    batch, tokens, heads, groups, size, rank, other = sizes
    tensors = random(batch, tokens, heads, rank), random(rank, groups * size), random(other, heads * size)

    def dense(context, right_v, left_o):
        heads_BTHD = torch.einsum("bthr,hrd->bthd", context, by_head(right_v, heads, size))
        return heads_BTHD.flatten(2) @ left_o.T

    return tensors, lambda *tensors: output_latent(*tensors, size), dense


@pytest.mark.parametrize("problem", [query_problem, output_problem])
@each_way
@each_size
def test_equals_dense_products(sizes, absorbs, problem, monkeypatch):
    if absorbs is not None:
        monkeypatch.setattr(latent_attention, "_absorbing_pays", lambda *args: absorbs)
    tensors, ours, dense = problem(sizes)
    found, expected = ours(*tensors), dense(*tensors)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@pytest.mark.parametrize("problem", [query_problem, output_problem])
@each_way
def test_gradients_of_gradients(absorbs, problem, monkeypatch):
    if absorbs is not None:
        monkeypatch.setattr(latent_attention, "_absorbing_pays", lambda *args: absorbs)
    tensors, ours, _ = problem((2, 2, 4, 2, 3, 2, 3))
    assert torch.autograd.gradcheck(ours, tensors)
    assert torch.autograd.gradgradcheck(ours, tensors)


def test_scores_of_all_heads_are_those_of_one_key():
    latent_q, latent_k, right_q, right_k = random(2, 5, 4), random(2, 7, 3), random(4, 18), random(3, 18)
    scores = torch.einsum("bthr,bsr->bhts", absorbed_query(latent_q, right_q, right_k, 6), latent_k)
    query, key = ((part @ right).unflatten(-1, (3, 6)) for part, right in ((latent_q, right_q), (latent_k, right_k)))
    torch.testing.assert_close(scores, torch.einsum("bthd,bshd->bhts", query, key))


@pytest.mark.parametrize(
    ("rows", "rank", "size", "other", "pays"),
    [(1, 8, 64, 8, False), (4096, 8, 64, 8, True), (4096, 64, 64, 64, True), (100000, 256, 64, 256, False)],
)
def test_halves_are_multiplied_first_where_that_takes_fewer_multiplications(rows, rank, size, other, pays):
    assert latent_attention._absorbing_pays(rows, rank, size, other) == pays


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_output_layer(dtype):
    (context, right_v, left_o), ours, dense = output_problem((2, 6, 6, 2, 4, 5, 3))
    found = ours(context.float(), right_v.to(dtype), left_o.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), dense(context, right_v, left_o), rtol=0.05, atol=0.3)


def test_autocast_does_not_round_once_more():
    tensors, ours, _ = query_problem((2, 6, 6, 2, 4, 5, 3))
    tensors = [tensor.float() for tensor in tensors]
    expected = ours(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(*tensors), expected)
