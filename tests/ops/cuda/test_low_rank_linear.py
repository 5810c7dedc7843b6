"""hf_comera/ops/cuda/low_rank_linear.py: says what kernels cannot take, and follows torch's precision."""

import pytest
import torch

from hf_comera.ops.cuda import low_rank_linear as module
from hf_comera.ops.cuda.low_rank_linear import low_rank_linear, low_rank_linear_backward, low_rank_linear_refusal


def operands(rank=16, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in ((4, 24), (rank, 24), (rank, 40))]


def changed(position, change):
    tensors = operands()
    tensors[position] = change(tensors[position])
    return tensors


REFUSED = {
    "float16": ("bfloat16", lambda: operands(dtype=torch.float16)),
    "float64": ("bfloat16", lambda: operands(dtype=torch.float64)),
    "mixed dtypes": ("different dtypes", lambda: changed(1, torch.Tensor.bfloat16)),
    "a rank of 12": ("not 12", lambda: operands(12)),
    "a rank of 0": ("not 0", lambda: operands(0)),
    "a rank of 136": ("not 136", lambda: operands(136)),
    "features": ("shapes do not fit", lambda: changed(0, lambda x: x[:, 1:])),
    "ranks that differ": ("shapes do not fit", lambda: changed(2, lambda right: right[:8])),
    "devices": ("different devices", lambda: changed(2, lambda right: right.to("meta"))),
    "another kind of device": ("not on meta", lambda: [each.to("meta") for each in operands()]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_says_what_it_cannot_take(case):
    words, make = REFUSED[case]
    tensors = make()
    assert words in low_rank_linear_refusal(*tensors)
    with pytest.raises(ValueError, match=words):
        low_rank_linear(*tensors)
    x, left, right = tensors
    with pytest.raises(ValueError, match=words):
        low_rank_linear_backward(x, None, x, x, left, right)


def test_takes_the_rest():
    assert low_rank_linear_refusal(*operands()) is None
    assert low_rank_linear_refusal(*operands(128, torch.bfloat16)) is None


@pytest.mark.parametrize(("setting", "number"), [("highest", 2), ("high", 1), ("medium", 1)])
def test_float32_products_follow_torch(setting, number):
    torch.set_float32_matmul_precision(setting)
    try:
        assert module.kernel_precision(torch.zeros(1)) == number
        assert module.kernel_precision(torch.zeros(1, dtype=torch.bfloat16)) == 0
    finally:
        torch.set_float32_matmul_precision("highest")
