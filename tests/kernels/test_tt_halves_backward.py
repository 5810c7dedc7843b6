"""kernels/tt_halves_backward.cu: gradients of cores and gates of all shapes are those of the obvious product."""

import pytest
import torch

from hf_comera.ops.cuda.halves import tt_halves_backward
from tests.kernels.kernel_errors import assert_as_exact, between_nans
from tests.kernels.test_tt_halves import FORMATS, SIDES, make_half, product


def gradients(half, grad, dtype):
    """Of cores, then of gates, from sums in ``dtype``; that cores with gates are rounded they do not see."""
    tensors = [tensor.to(dtype).requires_grad_() for tensor in (*half.cores, *half.gates)]
    cores, gates = tensors[: len(half.cores)], tensors[len(half.cores) :]
    scaled = [core * gate for core, gate in zip(cores, gates, strict=False)]
    rounded = [each + (each.to(half.cores[0].dtype).to(dtype) - each).detach() for each in scaled]
    return torch.autograd.grad(product([*rounded, *cores[len(gates) :]], half), tensors, grad.to(dtype))


def joined(tensors):
    return torch.cat([tensor.flatten() for tensor in (*tensors, torch.zeros(0))])


def draw_gradients(halves, dtype):
    device = halves[0].cores[0].device
    return [between_nans(torch.randn(half.rank, half.features).to(device, dtype)) for half in halves]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("half_dtype", FORMATS, ids=str)
@pytest.mark.parametrize("core_dtype", FORMATS, ids=str)
def test_all_shapes_in_one_call(core_dtype, half_dtype, gated, kernels):
    halves = [make_half(is_left, side, core_dtype, kernels, gated) for side in SIDES for is_left in (True, False)]
    grads = draw_gradients(halves, half_dtype)
    for half, grad, found in zip(halves, grads, tt_halves_backward(halves, grads), strict=True):
        stored = [tensor.dtype for tensor in (*half.cores, *half.gates)]
        assert [each.dtype for each in found] == stored
        plain, exact = (gradients(half, grad, dtype) for dtype in (torch.float32, torch.float64))
        plain = [each.to(dtype) for each, dtype in zip(plain, stored, strict=True)]
        # cores together, since errors of a few numbers are more chance than anything
        for part, dtype in ((slice(len(half.cores)), core_dtype), (slice(len(half.cores), None), torch.float32)):
            assert_as_exact(FORMATS[dtype], *(joined(each[part]) for each in (found, plain, exact)))


def test_the_same_bits_each_time_in_fresh_memory(kernels):
    halves = [make_half(is_left, SIDES[5], torch.float32, kernels, True) for is_left in (True, False) * 20]
    grads = draw_gradients(halves, torch.bfloat16)
    first, again = ([each for found in tt_halves_backward(halves, grads) for each in found] for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


def test_a_gradient_that_is_not_contiguous(kernels):
    half = make_half(True, SIDES[0], torch.float32, kernels)
    grad = torch.randn(half.features, half.rank, device=kernels).T
    expected = gradients(half, grad, torch.float32)
    for found, each in zip(tt_halves_backward([half], [grad])[0], expected, strict=True):
        torch.testing.assert_close(found, each)


def test_nothing_to_do_and_what_is_refused():
    assert tt_halves_backward([], []) == []
    half = make_half(True, SIDES[0], torch.float32, "cpu")
    with pytest.raises(ValueError, match="float64"):
        tt_halves_backward([half], [torch.zeros(half.rank, half.features, dtype=torch.float64)])
    with pytest.raises(ValueError, match="Call it once for each"):
        tt_halves_backward([half, make_half(True, SIDES[0], torch.bfloat16, "cpu")], [torch.zeros(16, 60)] * 2)
