"""hf_comera/memory/fp8_storage.py: activations are stored in FP8, once a storage; all else stays exact."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_comera.memory import SavedBytes
from hf_comera.memory.fp8_storage import Fp8Activations, Fp8Input

BATCH, TOKENS, WIDTH = 4, 6, 32
HIDDEN = torch.randn(BATCH, TOKENS, WIDTH)
MASK = torch.zeros(BATCH, 1, TOKENS, TOKENS)
ENCODED = torch.randn(BATCH, 20, WIDTH)
WEIGHT = torch.randn(BATCH * TOKENS, WIDTH)

SHAPES = [  # (shape, whether it is an activation)
    ((BATCH, TOKENS, WIDTH), True),
    ((BATCH, TOKENS, 128), True),
    ((BATCH * TOKENS, 128), True),
    ((BATCH, 3, TOKENS, 16), True),
    ((BATCH * 3, TOKENS, 16), True),
    ((BATCH, TOKENS, 3, 16), True),
    ((BATCH, TOKENS, 1), False),  # statistics
    ((BATCH, 3, TOKENS), False),
    ((BATCH, 3, TOKENS, TOKENS), False),  # scores
    ((BATCH, 3, TOKENS, 20), False),  # those of another sequence
    ((BATCH * 3, TOKENS, 20), False),
    ((1, 3, TOKENS, TOKENS), False),
    ((WIDTH, 128), False),
    ((WIDTH,), False),
]


def stored(tensor, *others):
    return Fp8Activations(HIDDEN, [HIDDEN, MASK, ENCODED, WEIGHT, *others], 0).stores(tensor)


@pytest.mark.parametrize(("shape", "expected"), SHAPES)
def test_activations_are_known_by_their_shape(shape, expected):
    assert stored(torch.empty(shape)) == expected


def test_what_the_layer_is_given_stays_exact():
    assert stored(HIDDEN)
    given = torch.empty(BATCH, TOKENS, 128)
    assert not stored(given, given)
    assert not stored(given[:, :], given)
    assert not stored(WEIGHT)


def test_the_input_alone():
    hooks = Fp8Input(HIDDEN, 0)
    assert hooks.stores(HIDDEN)
    assert not hooks.stores(HIDDEN.clone())
    assert not hooks.stores(HIDDEN[:2])


def gradients(function, x, **settings):
    with Fp8Activations(x, [x], settings.get("min_bytes", 0)), SavedBytes() as saved:
        y = function(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    return found, saved.total


def test_views_of_one_storage_are_stored_once():
    x = torch.randn(BATCH, TOKENS, 4 * WIDTH, requires_grad=True)

    def function(x):
        y = x * 2
        return y.view(BATCH * TOKENS, -1).square().sum() + y.mT.square().sum() + (y[..., :64] * y[..., 64:]).sum()

    found, num_bytes = gradients(function, x)
    (expected,) = torch.autograd.grad(function(x), x)
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    assert num_bytes <= 1.125 * x.numel() + 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_errors_are_those_of_fp8(dtype):
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    found, _ = gradients(lambda x: (x + 0).square(), x)
    torch.testing.assert_close(found, 2 * x.detach(), rtol=2**-4, atol=1e-2)
    assert not torch.equal(found, 2 * x.detach())
    exact, _ = gradients(lambda x: (x + 0).square(), x, min_bytes=1 << 20)
    assert torch.equal(exact, 2 * x.detach())


def test_masks_and_integers_stay_exact():
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    chosen = torch.rand(BATCH, TOKENS, WIDTH) < 0.5
    found, _ = gradients(lambda x: torch.where(chosen, x, -x), x)
    assert torch.equal(found, torch.where(chosen, 1.0, -1.0))


def test_memory_that_is_used_again_or_written_to_is_not_mistaken():
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)

    def function(x):
        total = 0
        for factor in range(1, 9):  # allocated where the one before was let go
            y = x.detach() * factor
            total = total + (x * y).sum()
            del y
        y = x.detach() + 1
        total = total + (x * y).sum()
        y.mul_(2)
        return total + (x * y).sum()

    found, _ = gradients(function, x)
    expected = (sum(range(1, 9)) + 3) * x.detach() + 3
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()


def test_exact_tensors_may_not_be_written_to():
    x, y = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True), torch.randn(WIDTH)
    with Fp8Activations(x, [x], 0):
        z = x * y
    y += 1
    with pytest.raises(RuntimeError, match="was modified in place: it is at version 1, expected version 0"):
        z.sum().backward()


def test_tensors_without_entries():
    with FakeTensorMode():
        x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
        found, num_bytes = gradients(lambda x: (x + 0).square(), x)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert num_bytes < x.nbytes + 2 * x.numel(), "the result beside the codes"
