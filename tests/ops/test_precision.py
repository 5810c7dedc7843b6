"""hf_comera/ops/precision.py: autocast decides the dtype of activations, and no device is in its way."""

import pytest
import torch

from hf_comera.ops.precision import autocast_dtype, autocast_input, chain_dtype, without_autocast

F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64


@pytest.mark.parametrize(
    ("dtype", "autocast", "expected"),
    [(F32, None, F32), (F32, BF16, BF16), (F64, BF16, F64), (I64, BF16, I64), (BF16, None, BF16)],
)
def test_the_dtype_of_activations(dtype, autocast, expected):
    x = torch.ones(2, dtype=dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        assert autocast_dtype(x) == autocast_input(x).dtype == expected


def test_products_within_stay_in_the_dtype_of_their_operands():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == BF16
        with without_autocast(x):
            assert (x @ x).dtype == F32


def test_a_device_that_has_no_autocast():
    x = torch.ones(2, 2, device="meta")
    assert autocast_dtype(x) == autocast_input(x).dtype == F32
    with without_autocast(x):
        assert (x @ x).shape == (2, 2)


@pytest.mark.parametrize(("dtype", "expected"), [(BF16, F32), (torch.float16, F32), (F32, F32), (F64, F64)])
def test_chains_are_contracted_in_float32_at_least(dtype, expected):
    assert chain_dtype(torch.ones(1, dtype=dtype)) == expected
