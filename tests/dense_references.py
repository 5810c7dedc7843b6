"""Dense matrices that tensor trains stand for, multiplied out the slow and obvious way: the oracle of all tests."""

import math

import torch


def multiply_out(cores):
    """``(1, n_1, r_1), ..., (r_{K-1}, n_K, 1) -> (n_1, ..., n_K)``."""
    product = cores[0]
    for core in cores[1:]:
        product = torch.tensordot(product, core, dims=1)
    return product[0, ..., 0]


def dense_matrix(cores, num_in, in_features, out_features):
    """The ``(in, out)`` matrix of a TT linear."""
    rows = math.prod(core.shape[1] for core in cores[:num_in])
    return multiply_out(cores).reshape(rows, -1)[:in_features, :out_features]


def dense_halves(cores, num_in, in_features, out_features):
    """The ``(in, rank)`` and ``(rank, out)`` matrices whose product is the matrix of a TT linear."""
    bond = torch.eye(cores[num_in].shape[0], dtype=cores[0].dtype)
    left, right = multiply_out([*cores[:num_in], bond[:, :, None]]), multiply_out([bond[None], *cores[num_in:]])
    return left.reshape(-1, len(bond))[:in_features], right.reshape(len(bond), -1)[:, :out_features]


def dense_table(cores, num_embeddings, embedding_dim):
    """The ``(vocabulary, hidden)`` table of a TTM embedding."""
    order = len(cores)
    flat = [core.reshape(core.shape[0], -1, core.shape[3]) for core in cores]
    pairs = [size for core in cores for size in core.shape[1:3]]
    axes = (*range(0, 2 * order, 2), *range(1, 2 * order, 2))
    table = multiply_out(flat).reshape(pairs).permute(axes)
    return table.reshape(math.prod(pairs[::2]), -1)[:num_embeddings, :embedding_dim]


def random_cores(in_factors, out_factors, rank, dtype=torch.float64):
    """Random cores of a TT linear with useful ranks."""
    from hf_comera.tt.cores import core_shapes
    from hf_comera.tt.shapes import useful_ranks

    factors = (*in_factors, *out_factors)
    shapes = core_shapes(factors, useful_ranks(factors, rank))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def random_ttm_cores(in_factors, out_factors, rank, dtype=torch.float64):
    """Random cores of a TTM embedding with useful ranks."""
    from hf_comera.tt.shapes import useful_ranks

    ranks = (1, *useful_ranks([v * h for v, h in zip(in_factors, out_factors, strict=True)], rank), 1)
    return [
        torch.randn(ranks[k], in_factors[k], out_factors[k], ranks[k + 1], dtype=dtype, requires_grad=True)
        for k in range(len(in_factors))
    ]
