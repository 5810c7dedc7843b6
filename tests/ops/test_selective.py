"""hf_comera/ops/selective.py: what is kept is not made again, the rest is, with the same bits."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_comera.ops.fused_loss import fixed_shapes
from hf_comera.ops.selective import (
    draws_numbers,
    is_fused_attention,
    is_kept_product,
    outside_of_selection,
    recomputed,
)

aten = torch.ops.aten


class Calls(TorchDispatchMode):
    """How often operators are called."""

    def __init__(self, *ops):
        super().__init__()
        self.counts = dict.fromkeys(ops, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.counts:
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def gradient(function, x, **options):
    torch.manual_seed(0)
    y = recomputed(function, x, **options) if options else function(x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_kept_is_made_once(keeps, dropout):
    weight = torch.randn(8, 8)

    def function(x):
        return functional.dropout((x @ weight).exp(), dropout) @ weight.T

    x = torch.randn(3, 8, requires_grad=True)
    expected = gradient(function, x)
    calls = Calls(aten.mm.default, aten.exp.default)
    with calls:
        found = gradient(function, x, keeps=lambda op, args: keeps and op is aten.mm.default)
    assert torch.equal(found, expected)
    backward = 2
    assert calls.counts == {aten.mm.default: 2 + backward + (not keeps), aten.exp.default: 2}
    assert not _get_current_dispatch_mode_stack()


def test_what_is_done_outside_of_it_need_not_be_done_again():
    weight, made = torch.randn(8, 8), []

    def function(x):
        if not made:
            with outside_of_selection():
                made.append(weight @ weight)
        return ((x @ made[0]).tanh() @ weight).tanh()

    x = torch.randn(3, 8, requires_grad=True)
    found = gradient(function, x, keeps=lambda op, args: op is aten.mm.default)
    assert torch.equal(found, gradient(function, x))


def test_what_is_kept_may_not_be_written_to():
    x = torch.randn(3, 8, requires_grad=True)

    def function(x):
        return (x @ torch.ones(8, 8)).mul_(2).exp()

    with pytest.raises(RuntimeError, match=r"shape \(3, 8\) that was kept .* modified in place.*'keep' for them"):
        gradient(function, x, keeps=lambda op, args: op is aten.mm.default)


def test_backward_may_pass_again():
    x = torch.randn(3, 8, requires_grad=True)
    y = recomputed(lambda x: (x @ torch.ones(8, 8)).tanh(), x, keeps=lambda op, args: op is aten.mm.default)
    first, again = (torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *again)


def test_autocast_casts_as_often_the_second_time():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def function(x):
        return (x @ weight).tanh() @ weight

    with torch.autocast("cpu", torch.bfloat16):
        function(x)  # the cast of the weight is cached
        y = recomputed(function, x, keeps=lambda op, args: False)
        assert torch.is_autocast_cache_enabled()
    y.float().sum().backward()
    assert x.grad is not None


def test_recorded_steps_keep_what_is_drawn():
    x = torch.randn(30, 8, requires_grad=True)

    def function(x):
        return torch.native_dropout(x.exp(), 0.5, True)[0].exp()

    calls = Calls(aten.native_dropout.default)
    with fixed_shapes(), calls:
        assert torch.equal(gradient(function, x, keeps=lambda op, args: False), gradient(function, x))
    assert calls.counts == {aten.native_dropout.default: 2}
    with fixed_shapes(), pytest.raises(ValueError, match=r"aten.bernoulli_.*set dropout to 0"):
        recomputed(lambda x: functional.dropout(x, 0.5), x, keeps=lambda op, args: False)


PRODUCTS = [  # (rows, inner, width), kept
    ((64, 768, 32), True),
    ((64, 768, 768), True),
    ((64, 768, 3072), True),
    ((64, 32, 768), False),
    ((64, 8, 33), False),
    ((64, 8, 32), True),
]


@pytest.mark.parametrize(("sizes", "kept"), PRODUCTS)
def test_products_are_kept_unless_they_are_made_of_latents(sizes, kept):
    rows, inner, width = sizes
    x, weight, bias = torch.empty(rows, inner), torch.empty(inner, width), torch.empty(width)
    assert is_kept_product(aten.mm.default, (x, weight)) == kept
    assert is_kept_product(aten.addmm.default, (bias, x, weight)) == kept
    assert not is_kept_product(aten.bmm.default, (x[None], weight[None]))


def test_fused_attention():
    assert is_fused_attention(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert not is_fused_attention(aten.softmax.int)


def test_attention_is_kept():
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    calls = Calls(aten._scaled_dot_product_flash_attention_for_cpu.default)
    with calls:
        gradient(
            lambda x: functional.scaled_dot_product_attention(x, x, x).exp(),
            x,
            keeps=lambda op, args: is_fused_attention(op),
        )
    assert list(calls.counts.values()) == [1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_with_dropout_draws_numbers(dropout):
    """Were it kept, its draws would be missing in backward, and all after it shifted."""
    x = torch.empty(1, 2, 16, 8)
    for op, before in (
        (aten._scaled_dot_product_flash_attention.default, ()),
        (aten._scaled_dot_product_efficient_attention.default, (None, True)),
    ):
        assert draws_numbers(op, (x, x, x, *before, dropout), {}) == (dropout > 0)
        assert draws_numbers(op, (x, x, x, *before), {"dropout_p": dropout}) == (dropout > 0)
        assert not draws_numbers(op, (x, x, x, *before), {})
