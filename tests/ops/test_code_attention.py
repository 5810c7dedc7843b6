"""hf_comera/ops/code_attention.py: attention over codes is attention, in values, gradients, dropout and precision."""

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from hf_comera.ops import kept_bits
from hf_comera.ops.code_attention import HeadCodes, core_attention, to_output_code, written_out

SIZES = [  # (batch, tokens, tokens of keys, heads, head size, rank of query, of key, of value)
    pytest.param((2, 5, 5, 3, 8, 4, 4, 4), id="square"),
    pytest.param((2, 3, 7, 2, 5, 4, 3, 2), id="all-differ"),
    pytest.param((1, 1, 4, 4, 2, 1, 1, 6), id="one-token-wide-value"),
    pytest.param((3, 6, 6, 1, 4, 2, 5, 1), id="one-head"),
    pytest.param((0, 5, 5, 2, 4, 3, 3, 3), id="empty"),
]


def problem(sizes, dtype=torch.float64):
    """Codes and right halves of query, key and value, and the left half of the output layer."""
    batch, tokens, key_tokens, heads, size, *ranks = sizes
    parts = [
        torch.randn(shape, dtype=dtype).div(shape[-1] ** 0.25).requires_grad_()
        for length, rank in zip((tokens, key_tokens, key_tokens), ranks, strict=True)
        for shape in ((batch, length, rank), (rank, heads * size))
    ]
    return [*parts, torch.randn(7, heads * size, dtype=dtype, requires_grad=True)]


def projections(parts, heads):
    return [HeadCodes(*parts[index : index + 2], heads) for index in (0, 2, 4)]


def over_codes(parts, heads, mask=None, **options):
    """What attention gives, and the code that the output layer makes of it."""
    query, key, value = projections(parts, heads)
    context = core_attention(query, key, value, mask, **options)
    return written_out(context), to_output_code(context, parts[-1])


def dense(parts, heads, mask=None, dropout=0.0, **options):
    wides = [written_out(part).unflatten(-1, (heads, -1)).transpose(1, 2) for part in projections(parts, heads)]
    given = {"attn_mask": mask, "dropout_p": dropout, **options}
    context = scaled_dot_product_attention(*wides, **given).transpose(1, 2).flatten(2)
    return context, linear(context, parts[-1])


def masks(sizes):
    batch, tokens, key_tokens = sizes[:3]
    padding = torch.arange(key_tokens) < key_tokens - 1
    return {
        "none": {},
        "padding": {"mask": padding.expand(batch, 1, tokens, key_tokens)},
        "float": {"mask": torch.randn(batch, 1, tokens, key_tokens, dtype=torch.float64)},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.3},
    }


@pytest.mark.parametrize("which", masks((1, 1, 1)))
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_attention(sizes, which):
    parts, heads, options = problem(sizes), sizes[3], masks(sizes)[which]
    ours, theirs = over_codes(parts, heads, **options), dense(parts, heads, **options)
    torch.testing.assert_close(ours, theirs)
    grads = [torch.randn_like(one) for one in ours]
    torch.testing.assert_close(torch.autograd.grad(ours, parts, grads), torch.autograd.grad(theirs, parts, grads))


def test_gradients_of_gradients():
    parts = problem((1, 3, 3, 2, 4, 2, 3, 2))
    assert torch.autograd.gradcheck(lambda *parts: over_codes(parts, 2), parts)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda *parts: over_codes(parts, 2)[1], parts)


def test_drops_what_attention_drops(monkeypatch):
    monkeypatch.setattr(kept_bits, "serves", lambda *args: False)
    parts, options = problem((2, 5, 6, 3, 8, 4, 4, 4)), {"dropout": 0.4}
    found = []
    for attention in (over_codes, dense):
        torch.manual_seed(3)
        found.append(attention(parts, 3, **options))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("which", masks((1, 1, 1)))
def test_mean_over_draws_is_attention_without_dropout(which):
    sizes = (4000, 5, 6, 3, 8, 4, 4, 4)
    parts, options = [part.detach() for part in problem((1, *sizes[1:]))], masks(sizes)[which]
    parts = [part.expand(4000, -1, -1) if part.ndim == 3 else part for part in parts]
    found = over_codes(parts, 3, dropout=0.25, **options)[1]
    wanted = over_codes(parts, 3, **options)[1]
    torch.testing.assert_close(found.mean(0), wanted[0] if which != "float" else wanted.mean(0), atol=0.05, rtol=0.1)


def test_a_mask_that_is_learned_gets_its_gradient_with_dropout_too(monkeypatch):
    monkeypatch.setattr(kept_bits, "WORTH_BITS", 1)
    mask = torch.randn(2, 1, 5, 6, dtype=torch.float64, requires_grad=True)
    code = over_codes(problem((2, 5, 6, 3, 8, 4, 4, 4)), 3, mask=mask, dropout=0.4)[1]
    assert torch.autograd.grad(code.sum(), mask)[0].any()


def test_dropping_all_leaves_nothing():
    assert not over_codes(problem((2, 5, 6, 3, 8, 4, 4, 4)), 3, dropout=1.0)[1].any()


@pytest.mark.parametrize("has_mask", [False, True])
def test_bf16_is_at_most_twice_as_far_off_as_attention(has_mask):
    parts = problem((4, 32, 32, 4, 64, 32, 32, 32))
    rounded = [part.detach().bfloat16() for part in parts]
    options = {"mask": torch.randn(4, 1, 32, 32)} if has_mask else {}
    exact = dense([part.double() for part in rounded], 4, **{name: mask.double() for name, mask in options.items()})
    ours = over_codes(rounded, 4, **options)
    theirs = dense(rounded, 4, **{name: mask.bfloat16() for name, mask in options.items()})
    for one, other, wanted in zip(ours, theirs, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - wanted).norm() <= 2 * (other - wanted).norm()
