"""hf_comera/ops/halves.py: the bodies of the operators give what stacked halves give."""

import pytest
import torch
from torch import nn

from hf_comera.ops.halves import Side, _flat, _halves_of, _tt_halves, _tt_halves_backward, model_halves, stacked_halves
from tests.dense_references import random_cores


def make_sides(gated, dtype=torch.float64):
    """Both sides of layers that can be stacked, and of one that cannot be stacked with them."""
    sides = []
    for in_factors, out_factors, ranks in (((4, 6), (6, 4), (3, 9)), ((2, 3, 4), (5, 5), (4,))):
        trains = [random_cores(in_factors, out_factors, rank, dtype) for rank in ranks]
        gates = [[nn.Parameter(torch.rand(core.shape[-1], dtype=dtype)) for core in cores[:-1]] for cores in trains]
        for on_left in (True, False):
            part = slice(len(in_factors)) if on_left else slice(len(in_factors), None)
            of_gates = [each[part] if gated else [] for each in gates]
            sides.append(Side([cores[part] for cores in trains], of_gates, on_left, 23, dtype))
    return sides


def operands(sides):
    return _flat([half for side in sides for half in _halves_of(side)])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_equal_stacked_halves(gated):
    sides = make_sides(gated)
    tensors = [tensor for side in sides for tensor in side.tensors()]
    expected = [half for side in sides for half in stacked_halves(side)]
    grads = [torch.randn_like(half) for half in expected]
    torch.testing.assert_close([half for side in model_halves(sides) for half in side], expected)
    torch.testing.assert_close(_tt_halves(*operands(sides), torch.float64), [half.detach() for half in expected])
    found = _tt_halves_backward(grads, *operands(sides))
    torch.testing.assert_close(found, list(torch.autograd.grad(expected, tensors, grads)))


def test_opcheck():
    tensors, layout = operands(make_sides(gated=True))
    halves = _tt_halves(tensors, layout, torch.float64)
    for operator, arguments in (
        (_tt_halves, (tensors, layout, torch.bfloat16)),
        (_tt_halves_backward, (halves, tensors, layout)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
