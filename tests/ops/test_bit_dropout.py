"""hf_comera/ops/bit_dropout.py: the share that is asked for is dropped, independently, and the rest scaled exactly."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from hf_comera.ops import bit_dropout
from hf_comera.ops.bit_dropout import MIN_NUMEL, draw_kept, drop, kept_factors, kept_share, serves

SHAPES = [(7,), (8,), (3, 5), (2, 3, 16), (4, 0), (0, 9), (1, 1), (100, 33)]


def kept_of(shape, dropout):
    return kept_factors(draw_kept(shape, dropout), shape[-1], True, torch.bool)


@pytest.mark.parametrize("dropout", [0.0001, 0.1, 1 / 3, 0.5, 0.9])
def test_drops_the_share_that_is_asked_for(dropout):
    kept = kept_of((1000, 1000), dropout).double()
    deviation = (dropout * (1 - dropout) / kept.numel()) ** 0.5
    assert abs(1 - kept.mean() - dropout) < 4 * deviation + 1 / 65536
    assert abs(kept_share(dropout) - (1 - dropout)) <= 0.5 / 65536
    for distance in (1, 4, 8, 1000):  # within a draw, to the next, within a byte, to the next row
        flat = kept.flatten()
        both = (flat[distance:] * flat[:-distance]).mean()
        assert abs(both - (1 - dropout) ** 2) < 8 * deviation + 2 / 65536


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_what_the_generator_says_whatever_the_chunk(shape, monkeypatch):
    torch.manual_seed(0)
    bits = draw_kept(shape, 0.5)
    assert bits.shape == (*shape[:-1], -(-shape[-1] // 8))
    assert bits.dtype == torch.uint8
    monkeypatch.setattr(bit_dropout, "_CHUNK_BYTES", 2)
    torch.manual_seed(0)
    assert torch.equal(draw_kept(shape, 0.5), bits)
    if bits.numel() > 3:
        assert not torch.equal(draw_kept(shape, 0.5), bits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), *SHAPES])
def test_keeps_and_scales(shape, dtype):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    bits = draw_kept((x.numel(),), 0.3)
    kept = kept_factors(bits, x.numel(), True, torch.bool).view(shape).double()
    y, exact = drop(x, bits, 0.7), x.detach().double() * kept / 0.7
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(grad.double(), kept / 0.7, rtol=torch.finfo(dtype).eps, atol=0)


def test_gradients_of_gradients():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    bits = draw_kept((x.numel(),), 0.3)
    assert torch.autograd.gradcheck(lambda x: drop(x, bits, 0.7), x)
    assert torch.autograd.gradgradcheck(lambda x: drop(x, bits, 0.7), x)


def test_other_layouts():
    x = torch.randn(4, 6).T
    bits = draw_kept((x.numel(),), 0.5)
    assert torch.equal(drop(x, bits, 0.5), drop(x.contiguous(), bits, 0.5))


def test_is_an_operator_of_torch():
    x = torch.randn(4, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.hf_comera.drop.default, (x, draw_kept((x.numel(),), 0.5), 0.5))


def test_saves_bits_only():
    x, saved = torch.randn(4, 64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes) or tensor, lambda x: x):
        drop(x, draw_kept((x.numel(),), 0.5), 0.5)
    assert saved == [4 * 64 // 8]


def test_bits_follow_from_a_seed_that_is_drawn():
    """So selective checkpointing may keep the bits and draw the seed alone again."""
    torch.manual_seed(0)
    draw_kept((1000,), 0.5)
    following = torch.rand(3)
    torch.manual_seed(0)
    seed = torch.randint(2**63 - 1, ())
    assert torch.equal(torch.rand(3), following)
    draws = [torch.ops.hf_comera.draw_kept(seed, (1000,), 1 << 15) for _ in range(2)]
    assert torch.equal(*draws)
    torch.library.opcheck(torch.ops.hf_comera.draw_kept.default, (seed, (3, 9), 1 << 15))


def test_fake_tensors():
    with FakeTensorMode():
        x = torch.randn(4, 33, requires_grad=True)
        y = drop(x, draw_kept((x.numel(),), 0.5), 0.5)
        y.sum().backward()
    assert y.shape == x.grad.shape == (4, 33)


@pytest.mark.parametrize(
    ("dropout", "expected"), [(0.0, False), (1e-6, False), (1e-4, True), (0.9, True), (1.0, False)]
)
def test_where_it_serves(dropout, expected):
    cpu = torch.device("cpu")
    assert serves(cpu, MIN_NUMEL, dropout) == expected
    assert not serves(cpu, MIN_NUMEL - 1, dropout)
    assert not serves(torch.device("cuda"), MIN_NUMEL, dropout)


def test_another_default_device():
    x = torch.randn(4, 9)
    with torch.device("meta"):
        y = drop(x, draw_kept((36,), 0.5), 0.5)
    assert y.device == x.device


def test_under_a_function_mode_draws_are_not_watched(monkeypatch):
    monkeypatch.setattr(bit_dropout, "_CHUNK_BYTES", 1)
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        draw_kept((800,), 0.5)
    assert len(seen) < 10
