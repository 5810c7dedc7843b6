"""hf_comera/ops/bit_dropout.py: masks come back as they were, from an eighth of a byte an entry."""

import pytest
import torch

from hf_comera.ops.bit_dropout import decode_bits, pack_bits

DTYPES = [torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1001])
def test_eight_truths_to_a_byte(size, device):
    truths = torch.rand(size, device=device) < 0.5
    bits = pack_bits(truths)
    assert (bits.shape, bits.dtype) == ((-(-size // 8),), torch.uint8)
    assert torch.equal(decode_bits(bits, torch.tensor(True, device=device))[:size], truths)


@pytest.mark.parametrize("start", [0, 3, 8])
def test_parts_of_memory(start):
    truths = torch.rand(40) < 0.5
    assert torch.equal(decode_bits(pack_bits(truths[start:]), torch.tensor(True))[: 40 - start], truths[start:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [1.0, 1 / 0.9, 0.0, 1e-7, 6e4])
def test_every_byte_in_every_dtype(dtype, value):
    numbers = torch.arange(256)[:, None].bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    bits = pack_bits(numbers.flatten().bool())
    assert torch.equal(bits, torch.arange(256, dtype=torch.uint8))
    entry = torch.tensor(value, dtype=dtype)
    found = decode_bits(bits.view(4, 64), entry)
    assert (found.shape, found.dtype) == ((4, 512), dtype)
    assert torch.equal(found.view(256, 8), torch.where(numbers.bool(), entry, torch.zeros_like(entry)))
