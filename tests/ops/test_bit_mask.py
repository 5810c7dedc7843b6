"""hf_comera/ops/bit_mask.py: masks come back as they were, from an eighth of a byte an entry."""

import pytest
import torch

from hf_comera.ops.bit_mask import BitMask

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(), (1,), (7,), (8,), (9,), (64,), (1001,), (3, 5, 7), (2, 8, 1, 4), (0,), (3, 0)]
RATES = [0.0, 0.1, 0.3, 1 / 3, 0.5, 0.9, 1.0]


def make(shape, dtype, rate, device):
    """What dropout saves: in a float dtype already divided by 1 - p."""
    kept = torch.rand(shape, device=device) >= rate
    return kept if dtype == torch.bool else kept.to(dtype) / (1 - rate if rate < 1 else 1)


def check(mask):
    packed = BitMask.of(mask)
    found = packed.decode()
    assert (packed.shape, packed.dtype, packed.bits.dtype) == (mask.shape, mask.dtype, torch.uint8)
    assert packed.bits.shape == (-(-mask.numel() // 8),)
    assert packed.nbytes == packed.bits.numel() + mask.itemsize
    assert (found.shape, found.dtype, found.device) == (mask.shape, mask.dtype, mask.device)
    assert torch.equal(found, mask)
    return packed


@pytest.mark.parametrize("dtype", [torch.bool, *FLOATS], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(dtype, shape, device):
    check(make(shape, dtype, 0.3, device))


@pytest.mark.parametrize("dtype", [torch.bool, *FLOATS], ids=str)
@pytest.mark.parametrize("rate", RATES)
def test_rates(dtype, rate, device):
    check(make((20, 31), dtype, rate, device))


@pytest.mark.parametrize("dtype", [torch.bool, *FLOATS], ids=str)
def test_every_byte_of_eight_truths(dtype):
    numbers = torch.arange(256)[:, None].bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    packed = check(numbers.to(dtype) * (True if dtype == torch.bool else 1.1))
    assert torch.equal(packed.bits, torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, 1 / 0.9, 1e-7, 6e4, "largest", "smallest"])
def test_values(dtype, value):
    info = torch.finfo(dtype)
    value = {"largest": info.max, "smallest": info.tiny}.get(value, value)
    mask = torch.tensor([0.0, value, 0.0, value], dtype=dtype)
    packed = check(mask)
    assert packed.value.shape == ()
    assert torch.equal(packed.value, mask[1])


LAYOUTS = {  # layout, whether strides are kept
    "transposed": (lambda x: x.mT, True),
    "permuted": (lambda x: x.permute(2, 0, 3, 1), True),
    "channels-last": (lambda x: x.contiguous(memory_format=torch.channels_last), True),
    "an-offset": (lambda x: x[1:], True),
    "an-odd-offset": (lambda x: x.flatten()[3:], True),
    "an-odd-offset-and-eights": (lambda x: x.flatten()[3:59], True),
    "an-axis-of-one": (lambda x: x[:, :1].permute(1, 0, 2, 3).contiguous().mT, True),
    "every-second": (lambda x: x[..., ::2], False),
    "expanded": (lambda x: x[:, :, :, :1].expand(-1, -1, -1, 6), False),
    "narrow": (lambda x: x[:, 1:3], False),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layout", "kept"), LAYOUTS.values(), ids=LAYOUTS)
def test_strides_are_kept_where_memory_is_filled(dtype, layout, kept, device):
    mask = layout(make((3, 4, 5, 6), dtype, 0.3, device))
    found = check(mask).decode()
    assert found.stride() == (mask if kept else mask.contiguous()).stride()


def saved_mask(rate, dtype):
    """What torch's own dropout saves for backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        torch.nn.functional.dropout(torch.ones(30, 41, dtype=dtype, requires_grad=True), rate)
    return saved[-1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_what_dropout_saves(dtype, rate):
    mask = saved_mask(rate, dtype)
    assert mask.shape == (30, 41)
    check(mask)
    check(torch.native_dropout(torch.ones(30, 41, dtype=dtype), rate, True)[1])


def test_nothing_is_recorded():
    packed = BitMask.of(torch.ones(9, requires_grad=True))
    assert not packed.value.requires_grad
    assert not packed.decode().requires_grad


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_read_from_the_device(dtype):
    """On the meta device there is nothing to read."""
    found = BitMask.of(torch.ones(3, 7, dtype=dtype, device="meta")).decode()
    assert (found.shape, found.dtype) == ((3, 7), dtype)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"dtype torch\.int64; dropout makes torch\.bool"):
        BitMask.of(torch.ones(3, dtype=torch.int64))
