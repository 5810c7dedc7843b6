"""hf_comera/tt/planner.py: the rule agrees with what was measured, and costs are those of what torch carries out."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_comera.ops import dense_linear
from hf_comera.ops.halves import layer_halves, padded_rank
from hf_comera.ops.low_rank import from_latent, to_latent
from hf_comera.tt.cores import core_shapes
from hf_comera.tt.planner import RULE, Product, half_products, path_products, prefers_dense, total_cost

# in_factors, out_factors, ranks, in_features, out_features
LAYERS = [
    ((6,), (5,), (8,), 6, 5),
    ((2, 3), (4, 2), (2, 8, 2), 6, 8),
    ((3, 3), (2, 5), (3, 16, 5), 7, 9),  # padding on both sides
    ((4,), (2, 3, 2), (8, 3, 2), 4, 12),
    ((2, 3, 2), (7,), (2, 5, 8), 11, 7),
    ((2, 1, 3), (3, 1), (2, 2, 8, 3), 6, 3),  # factors of one
    ((2, 2, 2, 2), (3, 2, 2, 2), (2, 3, 4, 8, 4, 3, 2), 15, 23),
]


@pytest.mark.parametrize(
    ("in_features", "out_features", "rank", "expected"),
    [
        (768, 768, 30, False),
        (768, 768, 384, False),  # as many multiplications: as fast in evaluation, training is faster in low rank
        (768, 768, 480, False),
        (768, 768, 488, True),
        (768, 3072, 768, False),  # halves are never much larger than such a matrix
        (4096, 4096, 64, False),
        (1, 1, 1, True),
        (12, 6, 0, False),
    ],
)
def test_the_rule(in_features, out_features, rank, expected):
    assert prefers_dense(in_features, out_features, rank) == expected == prefers_dense(out_features, in_features, rank)
    assert "1.25 N M" in RULE


@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward-backward"])
@pytest.mark.parametrize("dense", [False, True], ids=["low-rank", "dense"])
@pytest.mark.parametrize(("in_factors", "out_factors", "ranks", "in_features", "out_features"), LAYERS)
def test_flops_are_those_that_torch_carries_out(
    in_factors, out_factors, ranks, in_features, out_features, dense, training
):
    shapes, num_in, dtype = core_shapes((*in_factors, *out_factors), ranks), len(in_factors), torch.float64
    cores = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    x, middle = torch.randn(5, in_features, dtype=dtype, requires_grad=True), num_in - 1
    assert ranks[middle] == padded_rank(ranks[middle])
    products = half_products(in_factors, ranks[:num_in], dtype)
    products += half_products(out_factors[::-1], ranks[middle:][::-1], dtype)
    products += path_products(dense, (5, in_features, ranks[middle], out_features), dtype, kept=False)
    with FlopCounterMode(display=False) as counter:
        left, right = layer_halves(cores, num_in, in_features, out_features)
        y = dense_linear(x, left, right) if dense else from_latent(to_latent(x, left), right)
        if training:
            y.sum().backward()
    assert total_cost(products, training=training)[0] == counter.get_total_flops()


def test_a_kept_matrix_is_not_built():
    sizes = (5, 24, 8, 30)
    built, kept = (path_products(True, sizes, torch.float32, kept=kept) for kept in (False, True))
    assert built[1:] == kept == [Product(5, 24, 30, torch.float32)]


def test_bytes_count_each_operand_and_each_result_once():
    product = Product(7, 6, 5, torch.float64)
    assert total_cost([product], training=False) == (2 * 7 * 6 * 5, 8 * (7 * 6 + 6 * 5 + 7 * 5))
    assert total_cost([product, product], training=True) == (6 * 2 * 7 * 6 * 5, 6 * product.bytes)
