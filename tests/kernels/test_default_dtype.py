"""hf_comera/ops/cuda/: what kernels write to has the size they expect, whatever torch's default dtype is."""

import pytest
import torch

from tests.kernels.every_call import CALLS


@pytest.fixture
def default_dtype():
    """Sets torch's default dtype until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


# the calls are the same on a GPU, where too small a buffer may go unnoticed
@pytest.mark.parametrize("device", [torch.device("cpu")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepare", CALLS)
def test_results_do_not_depend_on_the_default(prepare, dtype, kernels, default_dtype):
    results = []
    for default in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        call = prepare(dtype)
        default_dtype(default)
        results.append([each.clone() for each in call()])
        default_dtype(torch.float32)
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
