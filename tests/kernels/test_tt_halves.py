"""kernels/tt_halves.cu: halves of trains of all shapes in one launch are those of the slow and obvious product."""

import math

import pytest
import torch

from hf_comera.ops.halves_kernels import Half, HalvesPlan, tt_halves
from tests.dense_references import multiply_out
from tests.kernels.kernel_errors import assert_as_exact

# factors, inner ranks, true rank, padded rank, features (None: all)
SIDES = [
    ((4, 3, 5), (6, 7), 10, 16, None),
    ((8,), (), 5, 8, 7),
    ((3, 4), (5,), 30, 32, 11),
    ((12, 8, 8), (30, 30), 30, 32, None),
    ((2, 1, 3, 2), (2, 3, 4), 3, 8, 12),
    ((2, 3, 2, 1, 2), (1, 9, 4, 1), 1, 8, 23),
    ((16, 16), (24,), 70, 72, 250),
]


def make_half(is_left, side, dtype, device):
    factors, inner, true_rank, rank, features = side
    ranks = (1, *inner, true_rank) if is_left else (true_rank, *inner, 1)
    shapes = zip(ranks, factors, ranks[1:], strict=False)
    cores = [(torch.randn(shape) / shape[0] ** 0.5).to(device, dtype) for shape in shapes]
    return Half(cores, is_left, features or math.prod(factors), rank)


def reference(half, dtype):
    """(rank, features) in a dtype, by dense products."""
    cores = [core.to(dtype) for core in half.cores]
    if half.is_left:
        bond = torch.eye(cores[-1].shape[2], dtype=dtype, device=cores[0].device)
        dense = multiply_out([*cores, bond[:, :, None]]).flatten(0, -2).T
    else:
        bond = torch.eye(cores[0].shape[0], dtype=dtype, device=cores[0].device)
        dense = multiply_out([bond[None], *cores]).flatten(1)
    result = dense.new_zeros(half.rank, half.features)
    result[: len(dense)] = dense[:, : half.features]
    return result


@pytest.mark.parametrize("result_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("core_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_shapes_in_one_launch(core_dtype, result_dtype, kernels):
    halves = [make_half(is_left, side, core_dtype, kernels) for side in SIDES for is_left in (True, False)]
    results = tt_halves(halves, result_dtype)
    assert len(results) == len(halves)
    for half, found in zip(halves, results, strict=True):
        assert found.dtype == result_dtype
        plain = reference(half, torch.float32).to(result_dtype)
        name = "bf16" if result_dtype == torch.bfloat16 else "fp32"
        assert_as_exact(name, found, plain, reference(half, torch.float64))
        true_rank = half.cores[-1].shape[2] if half.is_left else half.cores[0].shape[0]
        assert not found[true_rank:].any()


def test_a_plan_reads_the_cores_again(kernels):
    half = make_half(True, SIDES[0], torch.float32, kernels)
    plan = HalvesPlan([half], torch.float32)
    (before,) = [result.clone() for result in plan.run()]
    half.cores[1].mul_(2)
    assert torch.equal(plan.run()[0], 2 * before)


def test_halves_of_one_shape_are_stacked_in_memory(kernels):
    results = tt_halves([make_half(True, SIDES[0], torch.float32, kernels) for _ in range(3)], torch.float32)
    step = results[0].numel() * 4
    assert [result.data_ptr() - results[0].data_ptr() for result in results] == [0, step, 2 * step]


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
        (lambda half: half._replace(cores=[*half.cores[:2], half.cores[2].mT.contiguous().mT]), "contiguous"),
    ],
)
def test_refuses_what_the_kernel_cannot_take(change, words):
    half = make_half(True, SIDES[0], torch.float32, "cpu")
    with pytest.raises(ValueError, match=words):
        tt_halves([change(half)], torch.float32)
