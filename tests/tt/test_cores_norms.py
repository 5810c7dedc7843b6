"""hf_comera/tt/cores.py: as in float64 wherever the result is a number of the dtype, else the largest one."""

import math

import pytest
import torch

from hf_comera.tt.cores import finite_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-18, 1.0, 1e10, 1e19, 1e30, 1e36])
def test_as_in_float64(scale, dtype):
    tensors = [(scale * torch.randn(shape, dtype=torch.float64)).to(dtype) for shape in ((3, 5), (700,), (1,))]
    expected = torch.stack([tensor.double().norm() for tensor in tensors]).to(dtype)
    torch.testing.assert_close(finite_norms(tensors), expected, atol=0, rtol=4 * torch.finfo(dtype).eps)


def test_too_large_for_the_dtype_is_the_largest_number():
    largest = torch.finfo(torch.float32).max
    found = finite_norms([torch.full((9,), largest), torch.tensor([math.inf]), torch.full((9,), largest / 10)])
    assert found[:2].tolist() == [largest] * 2
    torch.testing.assert_close(found[2], torch.tensor(largest / 10 * 3))


def test_nan_stays():
    assert finite_norms([torch.tensor([1.0, math.nan]), torch.ones(4)]).tolist()[1] == 2
    assert finite_norms([torch.tensor([1.0, math.nan])]).isnan()
