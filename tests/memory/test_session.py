"""hf_comera/memory/session.py: whatever a model does with tensors, gradients are those of plain autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.memory.policy_runs import EXACT, Of, assert_same, run

every_exact_policy = pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)


class SavesAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right, left * right)
        return left * right

    @staticmethod
    def backward(ctx, gradient):
        left, right, product = ctx.saved_tensors
        return gradient * right + product, gradient * left


class Sub(torch.Tensor):
    pass


def doubled(module, x):
    return module.first(x) * 2


def as_complex(x):
    return torch.view_as_complex(x.unflatten(-1, (4, 2)))


def heads(module, x):
    query, key = (layer(x).view(4, 6, 4, 2).transpose(1, 2) for layer in (module.first, module.second))
    return query, key, key


def chunks(module, x):
    left, right = doubled(module, x).chunk(2, -1)
    return functional.gelu(left) * right


def slices(module, x):
    y = doubled(module, x)
    return torch.cat([y[:, ::2].exp() * y[:, ::2], y[:, 1::2].tanh() * y[:, :3]], 1)


def unbound(module, x):
    left, right = doubled(module, x).view(4, 6, 2, 4).unbind(2)
    return left.exp() * right


def indexed(module, x):
    y = doubled(module, x)
    return y[:, [0, 2, 1]].exp() * y[:, :3].masked_fill(y[:, :3] > 0, 2.0).exp()


def top(module, x):
    values, places = doubled(module, x).topk(3, -1)
    return values.exp() * x.gather(-1, places)


def bits_viewed(module, x):
    y = module.first(x).relu()
    large = (y.detach().view(torch.int32) > 1000).float()
    return y * large * (y * large)


def viewed_complex(module, x):
    y = (x * 2).transpose(0, 1)
    return torch.view_as_real(as_complex(y) * as_complex(y).abs()).flatten(-2) * y


def conjugated(module, x):
    y = module.first(x) * 1.5
    product = (as_complex(y).conj() * 2) * (as_complex(y) * 3) * as_complex(y).conj().exp()
    return torch.view_as_real(product).flatten(-2) * y


def negated_view(module, x):
    part = as_complex(module.first(x) * 1.5).conj().imag
    return (part * 2) * (part * 3) * part.exp() * part


def made_in_inference_mode(module, x):
    with torch.inference_mode():
        shift = torch.ones(8)
    return (module.first(x) + shift).exp() * shift.clone()


def written_by_out(module, x):
    with torch.no_grad():
        doubled = torch.empty_like(x)
        torch.mul(x, 2, out=doubled)
    return module.first(x) * doubled


def sparse_product(module, x):
    entries = torch.sparse_coo_tensor([[0, 1], [1, 2]], torch.ones(2), (8, 8), check_invariants=False)
    return torch.sparse.mm(entries, x[0].t()).t() * module.first(x[0])


def gradient_inside(module, x):
    y = module.first(x).tanh()
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return gradient.exp() * y


def long_chain(module, x):
    for _ in range(2000):
        x = x + 0.001
    return x.exp() * x


def only_math(module, x):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*heads(module, x)).exp()


def grouped_heads(module, x):
    query, key, value = heads(module, x)
    pair = key[:, :2], value[:, :2]
    return functional.scaled_dot_product_attention(query, *pair, dropout_p=0.1, enable_gqa=True)


def learned_bias(module, x):
    bias = x[:, :1, None, :6] * module.first.weight[0, 0]
    return functional.scaled_dot_product_attention(*heads(module, x), attn_mask=bias, dropout_p=0.2, scale=0.3)


def bool_mask(module, x):
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return functional.scaled_dot_product_attention(*heads(module, x), attn_mask=mask).exp()


def random_functions(module, x):
    y = functional.rrelu(module.first(x), training=True) * functional.alpha_dropout(x, 0.5)
    return y * functional.dropout1d(x, 0.5) * functional.feature_alpha_dropout(x, 0.3)


def new_leaf(module, x):
    shift = torch.zeros(8, requires_grad=True)
    return (x + shift).exp() * shift.exp()


def recurrent(module, x):
    return module.recurrent(x)[0].exp()


def in_another_default_dtype(module, x):
    torch.set_default_dtype(torch.float64)
    try:
        thirds = torch.ones(4, 6, 8) / 3
    finally:
        torch.set_default_dtype(torch.float32)
    return (module.first(x) * thirds).float() * x


USES = {
    "another default dtype": in_another_default_dtype,
    "chunks": chunks,
    "slices": slices,
    "unbind": unbound,
    "index": indexed,
    "topk and gather": top,
    "bits viewed": bits_viewed,
    "view as complex": viewed_complex,
    "conjugate": conjugated,
    "negative bit": negated_view,
    "made in inference mode": made_in_inference_mode,
    "out": written_by_out,
    "sparse": sparse_product,
    "gradient inside": gradient_inside,
    "long chain": long_chain,
    "kernel of attention chosen": only_math,
    "grouped heads": grouped_heads,
    "learned bias": learned_bias,
    "mask of bools": bool_mask,
    "random functions": random_functions,
    "leaf made inside": new_leaf,
    "lstm": recurrent,
    "custom function": lambda module, x: SavesAll.apply(doubled(module, x), module.first(x) * 3),
    "expand": lambda module, x: (x.sum(0) * 2).expand(4, 6, 8) * module.first(x),
    "broadcast sum": lambda module, x: (x.sum(0, keepdim=True) + module.first(x)).exp() * x,
    "expanded sum": lambda module, x: (x[0] + x[1]).exp().expand(2, 6, 8) * module.first(x[:2]).exp(),
    "not contiguous": lambda module, x: (x.transpose(0, 1) * 2).exp() * module.first(x.transpose(0, 1)),
    "permuted product": lambda module, x: (x * 2).transpose(1, 2) @ module.first(x).exp(),
    "double": lambda module, x: (module.first(x).double().exp() * x.double()).float(),
    "where": lambda module, x: torch.where(x > 0, module.first(x), x * 2).exp() * x,
    "einsum": lambda module, x: torch.einsum("abc,adc->abd", module.first(x), x).exp(),
    "attention module": lambda module, x: module.attention(x, x, x)[0].exp(),
    "group norm": lambda module, x: functional.group_norm(x, 2) * functional.normalize(x, dim=-1),
    "batch norm": lambda module, x: module.batch_norm(x).exp() * x,
    "embedding with a largest norm": lambda module, x: module.words(torch.arange(24).view(4, 6) % 8).exp() * x,
    "subclass": lambda module, x: (x.as_subclass(Sub) * module.first(x)).as_subclass(torch.Tensor).exp(),
    "vmap": lambda module, x: torch.vmap(lambda row: module.norm(row).exp() * row)(x),
    "fourier transform": lambda module, x: torch.fft.irfft(torch.fft.rfft(doubled(module, x)) * 2j).exp(),
    "everything dropped": lambda module, x: functional.dropout(module.first(x), 1.0) * functional.dropout(x, 0.0),
    "dropout in place": lambda module, x: functional.dropout(module.first(x), 0.3, inplace=True) * x,
    "buffer": lambda module, x: (x * module.scale).exp() * (x + module.scale),
    "layer twice": lambda module, x: module.first(module.norm(module.first(module.norm(x)))).exp(),
}


@every_exact_policy
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_gradients_are_those_of_plain_autograd(use, policy):
    module, x = Of(use), torch.randn(4, 6, 8, requires_grad=True)
    module.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    module.recurrent, module.batch_norm = nn.LSTM(8, 8), nn.BatchNorm1d(6)
    module.words = nn.Embedding(8, 8, max_norm=0.5)
    module.words(torch.arange(8))  # so that it has written to its weight already
    plain = run(module, {"x": x}, None)
    assert_same(run(module, {"x": x}, policy), plain)
