"""hf_comera/ops/halves.py: stacked halves and their gradients are those of each layer alone, whatever the ranks."""

import pytest
import torch

from hf_comera.ops.halves import Side, layer_halves, stacked_halves
from tests.dense_references import dense_halves, random_cores

FACTORS = [  # (in_factors, out_factors, in_features, out_features)
    pytest.param((4, 6), (6, 4), 24, 24, id="two-factors"),
    pytest.param((2, 3, 2), (3, 2, 2), 12, 12, id="three-factors"),
    pytest.param((5,), (7,), 5, 7, id="one-factor"),
    pytest.param((6,), (2, 2, 3), 6, 12, id="one-against-three"),
    pytest.param((1, 5), (5, 1), 5, 5, id="factors-of-one"),
    pytest.param((3, 3), (3, 4), 7, 11, id="padded"),
]
RANKS = [pytest.param(ranks, id="-".join(map(str, ranks))) for ranks in [(3, 3, 3), (1, 4, 9), (8,), (2, 17)]]


def sides(trains, gates, num_in, in_features, out_features, dtype=torch.float64):
    """The left and the right side of ``trains``."""
    return [
        Side([cores[:num_in] for cores in trains], [some[:num_in] for some in gates], True, in_features, dtype),
        Side([cores[num_in:] for cores in trains], [some[num_in:] for some in gates], False, out_features, dtype),
    ]


def random_gates(cores):
    return [torch.rand(core.shape[-1], dtype=core.dtype, requires_grad=True) for core in cores[:-1]]


@pytest.mark.parametrize(("in_factors", "out_factors", "in_features", "out_features"), FACTORS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_stacked_halves_are_those_of_each_layer(in_factors, out_factors, in_features, out_features, ranks, gated):
    trains = [random_cores(in_factors, out_factors, rank) for rank in ranks]
    gates = [random_gates(cores) if gated else [] for cores in trains]
    num_in = len(in_factors)
    ours = list(zip(*map(stacked_halves, sides(trains, gates, num_in, in_features, out_features)), strict=True))
    for cores, some_gates, (left, right) in zip(trains, gates, ours, strict=True):
        rank = cores[num_in].shape[0]
        scaled = [core * gate for core, gate in zip(cores, some_gates, strict=False)] + cores[len(some_gates) :]
        expected = layer_halves(scaled, num_in, in_features, out_features)
        dense_left, dense_right = dense_halves(scaled, num_in, in_features, out_features)
        torch.testing.assert_close(left[:rank], dense_left.T)
        torch.testing.assert_close(right[:rank], dense_right)
        assert left.shape[0] == right.shape[0] == -(-rank // 8) * 8
        grads = [torch.randn_like(left), torch.randn_like(right)]
        tensors = [*cores, *some_gates]
        torch.testing.assert_close(
            torch.autograd.grad([left, right], tensors, grads), torch.autograd.grad(expected, tensors, grads)
        )


def test_gradcheck_and_second_derivatives():
    trains = [random_cores((2, 3), (3, 2), rank) for rank in (2, 3)]
    gates = [random_gates(cores) for cores in trains]
    flat = [tensor for cores, some in zip(trains, gates, strict=True) for tensor in (*cores, *some)]

    def op(*tensors):
        cut = [tensors[:7], tensors[7:]]
        parts = sides([list(part[:4]) for part in cut], [list(part[4:]) for part in cut], 2, 6, 6)
        return tuple(half for side in parts for half in stacked_halves(side))

    assert torch.autograd.gradcheck(op, flat)
    assert torch.autograd.gradgradcheck(op, flat)


def test_halves_that_nobody_used_leave_their_cores_without_gradient():
    trains = [random_cores((2, 3), (3, 2), rank) for rank in (2, 3, 4)]
    left, _ = sides(trains, [[], [], []], 2, 6, 6)
    halves = stacked_halves(left)
    (halves[0].sum() + halves[2].square().sum()).backward()
    assert trains[1][0].grad is None
    reference = layer_halves(trains[2], 2, 6, 6)[0]
    torch.testing.assert_close(trains[2][1].grad, torch.autograd.grad(reference.square().sum(), trains[2][1])[0])
    assert trains[0][2].grad is None, "the other side was not asked"


def test_gradients_can_be_asked_for_again():
    trains = [random_cores((2, 3), (3, 2), 2)]
    left, _ = sides(trains, [[]], 2, 6, 6)
    (half,) = stacked_halves(left)
    assert not half.grad_fn.has_met_backward
    first = torch.autograd.grad(half.sum(), trains[0][0])[0]
    assert half.grad_fn.has_met_backward
    assert torch.equal(torch.autograd.grad(half.sum(), trains[0][0])[0], first)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_cores_are_contracted_in_float32_and_rounded_once(stored):
    trains = [
        [core.detach().to(stored).requires_grad_() for core in random_cores((4, 4), (4, 4), 6)] for _ in range(2)
    ]
    left, _ = sides(trains, [[], []], 2, 16, 16, torch.bfloat16)
    for half, cores in zip(stacked_halves(left), trains, strict=True):
        exact = layer_halves([core.detach().float() for core in cores], 2, 16, 16)[0]
        assert torch.equal(half, exact.bfloat16())
        half.sum().backward()
        assert cores[0].grad.dtype == stored


def test_gates_are_rounded_like_cores_with_folded_gates():
    cores = [core.detach().bfloat16() for core in random_cores((4, 4), (4, 4), 6)]
    gates = [torch.rand(core.shape[-1]) for core in cores[:-1]]
    folded = [(core * gate).bfloat16() for core, gate in zip(cores, gates, strict=False)] + cores[-1:]
    for plain, gated in zip(
        sides([folded], [[]], 2, 16, 16, torch.float32), sides([cores], [gates], 2, 16, 16, torch.float32), strict=True
    ):
        assert torch.equal(stacked_halves(plain)[0], stacked_halves(gated)[0])
