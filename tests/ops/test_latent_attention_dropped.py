"""hf_comera/ops/latent_attention.py: attention with dropout is that of the mask it draws, however it is cut."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from hf_comera.ops import latent_attention as module
from hf_comera.ops.bit_dropout import draw_kept, kept_factors
from hf_comera.ops.latent_attention import bias_of_mask, dropped_attention
from tests.operation_count import CountOperations

SIZES = [  # (batch, tokens, tokens of keys, heads, rank)
    pytest.param((3, 5, 5, 2, 4), id="square"),
    pytest.param((2, 3, 7, 3, 5), id="all-differ"),
    pytest.param((1, 1, 4, 4, 2), id="one-token"),
    pytest.param((2, 6, 1, 1, 3), id="one-key"),
    pytest.param((0, 5, 5, 2, 4), id="empty"),
    pytest.param((2, 0, 5, 2, 4), id="no-tokens"),
]
CHUNKS = [1, 13, 40, 1 << 20]  # scores at a time: a token, some, a sequence, all


def problem(sizes, dtype=torch.float64):
    batch, tokens, key_tokens, heads, rank = sizes
    shapes = (batch, tokens, heads, rank), (batch, key_tokens, rank), (batch, key_tokens, rank)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def masks(sizes):
    batch, tokens, key_tokens, heads, _ = sizes
    padding = torch.rand(batch, 1, 1, key_tokens) < 0.7
    some = torch.rand(batch, 1, tokens, key_tokens) < 0.5
    bias = torch.randn(batch, heads, tokens, key_tokens, dtype=torch.float64)
    return {
        "none": {},
        "padding": {"attn_mask": padding},
        "expanded": {"attn_mask": padding.expand(batch, 1, tokens, key_tokens)},
        "dead rows": {"attn_mask": some & (torch.arange(tokens) % 2 == 0)[:, None]},
        "bias": {"attn_mask": bias},
        "matrix": {"attn_mask": bias[0, 0] if batch else bias.new_zeros(tokens, key_tokens)},
        "minus infinity": {"attn_mask": torch.zeros(()).where(some, -torch.inf)},
        "causal": {"is_causal": True},
        "causal padding": {"is_causal": True, "attn_mask": padding},
        "causal bias": {"is_causal": True, "attn_mask": bias},
        "one key for all": {"attn_mask": some[..., :1]},
        "row": {"attn_mask": torch.rand(key_tokens) < 0.7},
    }


def drawn(sizes, share=0.625):
    """Bits of what is kept, and the same as ``(B, H, T, S)`` bools."""
    batch, tokens, key_tokens, heads, _ = sizes
    bits = draw_kept((batch, tokens, heads, key_tokens), 1 - share)
    return bits, kept_factors(bits, key_tokens, True, torch.bool).transpose(1, 2)


def reference(query, key, value, attn_mask=None, *, kept, share, is_causal=False, scale):
    """The same by plain functions, as ``(B, T, H, R)``."""
    scores = scale * query.transpose(1, 2) @ key.unsqueeze(1).transpose(2, 3)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros((), dtype=scores.dtype).where(attn_mask, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -torch.inf)
    shares = scores.softmax(-1).nan_to_num(0) if scores.isinf().any() else scores.softmax(-1)
    return ((shares * kept / share) @ value.unsqueeze(1)).transpose(1, 2)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("which", masks((1, 1, 1, 1, 1)))
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_attention_with_the_same_mask(sizes, which, chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_SCORES", chunk)
    parts, options, (bits, kept) = problem(sizes), masks(sizes)[which], drawn(sizes)
    ours = dropped_attention(*parts, bits, share=0.625, scale=0.3, **options)
    wanted = reference(*parts, kept=kept, share=0.625, scale=0.3, **options)
    torch.testing.assert_close(ours, wanted)
    grad = torch.randn_like(ours)
    found = torch.autograd.grad(ours, parts, grad)
    expected = torch.autograd.grad(wanted, parts, grad)
    if not any(each.isnan().any() for each in expected):  # as plain functions give for rows in which no score counts
        torch.testing.assert_close(found, expected)
    assert all(one.isfinite().all() for one in found)


def test_a_dead_row_moves_nothing():
    parts, (bits, _) = problem((1, 2, 3, 2, 4)), drawn((1, 2, 3, 2, 4))
    mask = torch.tensor([[True], [False]]).expand(2, 3)
    out = dropped_attention(*parts, bits, mask, share=0.625, scale=1.0)
    assert not out[:, 1].any()
    assert not any(each.any() for each in torch.autograd.grad(out[:, 1].sum(), parts))


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_gradients_of_gradients(chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_SCORES", chunk)
    mask = torch.rand(1, 1, 3, 4) < 0.7
    mask[..., 1, :] = False
    parts, (bits, _) = problem((1, 3, 4, 2, 3)), drawn((1, 3, 4, 2, 3))

    def attend(*parts):
        return dropped_attention(*parts, bits, mask, share=0.625, scale=0.7)

    assert torch.autograd.gradcheck(attend, parts)
    assert torch.autograd.gradgradcheck(attend, parts)


def test_bf16_is_at_most_twice_as_far_off_as_attention():
    parts = [part.detach() for part in problem((4, 32, 32, 4, 64), torch.bfloat16)]
    bits, kept = drawn((4, 32, 32, 4, 64), 0.5)
    wanted = reference(*(part.double() for part in parts), kept=kept, share=0.5, scale=0.1)
    ours = dropped_attention(*parts, bits, share=0.5, scale=0.1)
    query, key, value = parts
    shares = ((query.transpose(1, 2) * 0.1) @ key.unsqueeze(1).transpose(2, 3)).softmax(-1)
    theirs = ((shares * kept * 2) @ value.unsqueeze(1)).transpose(1, 2)
    assert ours.dtype == torch.bfloat16
    assert (ours - wanted).norm() <= 2 * (theirs - wanted).norm()


def test_saves_nothing_of_the_size_of_scores():
    sizes = (2, 32, 32, 4, 3)
    parts, (bits, _), saved = problem(sizes), drawn(sizes), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes) or tensor, lambda x: x):
        dropped_attention(*parts, bits, share=0.625, scale=1.0)
    assert max(saved) == parts[0].nbytes


def test_whoever_watches_calls_sees_one():
    parts, (bits, _), seen = problem((1, 2, 2, 1, 2)), drawn((1, 2, 2, 1, 2)), []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        dropped_attention(*parts, bits, share=0.625, scale=1.0)
    assert seen == [torch.ops.hf_comera.dropped_attention.default]


@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_under_autocast(create_graph):
    parts, (bits, _), found = problem((2, 3, 5, 2, 4), torch.float32), drawn((2, 3, 5, 2, 4)), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = dropped_attention(*parts, bits, share=0.625, scale=1.0)
            found.append((y, *torch.autograd.grad(y.square().sum(), parts, create_graph=create_graph)))
    torch.testing.assert_close(*found)


def test_another_default_device():
    parts, (bits, _) = problem((2, 3, 5, 2, 4)), drawn((2, 3, 5, 2, 4))
    mask = torch.ones(3, 5, dtype=torch.bool)
    with torch.device("meta"):
        y = dropped_attention(*parts, bits, mask, share=0.625, is_causal=True, scale=1.0)
    assert torch.autograd.grad(y.sum(), parts)[0].device == parts[0].device


def test_bias_of_mask():
    mask = torch.tensor([True, False, True])
    assert bias_of_mask(mask, torch.float32).tolist() == [0.0, -torch.inf, 0.0]


def test_a_mask_expanded_in_memory_is_not_written_out():
    wide = torch.zeros(1, 1, 1, 5).expand(2, 3, 4, 5)
    assert module._unexpanded(wide).shape == (1, 1, 1, 5)


def test_estimates_do_not_pay_for_each_chunk(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_SCORES", 1)
    with FakeTensorMode():
        parts = problem((64, 64, 64, 2, 4))
        bits = draw_kept((64, 64, 2, 64), 0.5)
        with CountOperations() as count:
            dropped_attention(*parts, bits, share=0.5, scale=1.0).sum().backward()
    assert count.total < 1000  # with 4096 chunks


@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_is_well_formed(masked):
    query, key, value = (torch.randn(2, 5, *size, 4, requires_grad=True) for size in ((3,), (), ()))
    bits = draw_kept((2, 5, 3, 5), 0.4)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril() if masked else None
    arguments = (query, key, value, bits, mask, 0.6, not masked, 0.5)
    torch.library.opcheck(torch.ops.hf_comera.dropped_attention.default, arguments)
