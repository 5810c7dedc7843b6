"""kernels/tt_halves.cu: halves of trains of all shapes in one launch are those of the slow and obvious product."""

import math

import pytest
import torch
from torch.nn.functional import pad

from hf_comera.ops.cuda.halves import Half, tt_halves
from tests.dense_references import multiply_out
from tests.kernels.kernel_errors import assert_as_exact, between_nans

# factors, inner ranks, true rank, padded rank, features (None: all)
SIDES = [
    ((4, 3, 5), (6, 7), 10, 16, None),
    ((8,), (), 5, 8, 7),
    ((3, 4), (5,), 30, 32, 11),
    ((12, 8, 8), (30, 30), 30, 32, None),
    ((2, 1, 3, 2), (2, 3, 4), 3, 8, 12),
    ((2, 3, 2, 1, 2), (1, 9, 4, 1), 1, 8, 23),
    ((16, 16), (24,), 70, 72, 250),
    ((40, 60), (50,), 40, 40, None),
]


FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def make_half(is_left, side, dtype, device, gated=False):
    factors, inner, true_rank, rank, features = side
    ranks = (1, *inner, true_rank) if is_left else (true_rank, *inner, 1)
    shapes = zip(ranks, factors, ranks[1:], strict=False)
    cores = [between_nans((torch.randn(shape) / shape[0] ** 0.5).to(device, dtype)) for shape in shapes]
    gates = [between_nans(torch.rand(rank, device=device)) for rank in ranks[1:]] if gated else []
    return Half(cores, is_left, features or math.prod(factors), rank, gates if is_left else gates[:-1])


def reference(half, dtype):
    """(rank, features) in a dtype, by dense products, with cores rounded as folded gates leave them."""
    gated = [(core * gate).to(core.dtype) for core, gate in zip(half.cores, half.gates, strict=False)]
    return product([core.to(dtype) for core in [*gated, *half.cores[len(gated) :]]], half)


def product(cores, half):
    bond = torch.eye(half.true_rank, dtype=cores[0].dtype, device=cores[0].device)
    if half.is_left:
        dense = multiply_out([*cores, bond[:, :, None]]).flatten(0, -2).T
    else:
        dense = multiply_out([bond[None], *cores]).flatten(1)
    return pad(dense[:, : half.features], (0, 0, 0, half.rank - len(dense)))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("result_dtype", FORMATS, ids=str)
@pytest.mark.parametrize("core_dtype", FORMATS, ids=str)
def test_all_shapes_in_one_launch(core_dtype, result_dtype, gated, kernels):
    halves = [make_half(is_left, side, core_dtype, kernels, gated) for side in SIDES for is_left in (True, False)]
    results = tt_halves(halves, result_dtype)
    assert len(results) == len(halves)
    for half, found in zip(halves, results, strict=True):
        assert found.dtype == result_dtype
        plain = reference(half, torch.float32).to(result_dtype)
        assert_as_exact(FORMATS[result_dtype], found, plain, reference(half, torch.float64))
        assert not found[half.true_rank :].any()


def test_every_call_reads_the_cores_anew_and_writes_to_fresh_memory(kernels):
    half = make_half(True, SIDES[0], torch.float32, kernels)
    (before,) = tt_halves([half], torch.float32)
    expected = 2 * before
    half.cores[1].mul_(2)
    (after,) = tt_halves([half], torch.float32)
    assert torch.equal(after, expected)
    assert torch.equal(before, expected / 2)


def test_more_sides_than_a_launch_has_room_for(kernels):
    halves = [make_half(is_left, SIDES[4], torch.float32, kernels, True) for is_left in (True, False) * 20]
    for half, found in zip(halves, tt_halves(halves, torch.float32), strict=True):
        torch.testing.assert_close(found, reference(half, torch.float32))


def test_nothing_to_do():
    assert tt_halves([], torch.float32) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda half: half._replace(rank=8), "a rank of 10"),
        (lambda half: half._replace(features=61), "cover 60"),
        (lambda half: half._replace(cores=half.cores[:1] * 9), "9 cores"),
        (lambda half: half._replace(cores=[half.cores[0].double(), *half.cores[1:]]), "float64"),
        (lambda half: half._replace(cores=[*half.cores[:2], half.cores[2].bfloat16()]), "one dtype"),
        (lambda half: half._replace(gates=[torch.ones(6, dtype=torch.float64)]), "gates in float32"),
        (lambda half: half._replace(cores=[core.to("meta") for core in half.cores]), "not on meta"),
        (lambda half: half._replace(cores=[*half.cores[:2], half.cores[2].mT.contiguous().mT]), "contiguous"),
    ],
)
def test_refuses_what_the_kernel_cannot_take(change, words):
    half = make_half(True, SIDES[0], torch.float32, "cpu")
    with pytest.raises(ValueError, match=words):
        tt_halves([change(half)], torch.float32)
