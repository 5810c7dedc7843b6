"""Attention of TT linears, its input, and all its results, with codes or without."""

from types import SimpleNamespace

import torch
from hf_comera.modules.joined import JoinedProjections
from torch import nn
from torch.nn import functional

from hf_comera.modules import TTLinear

HEADS, SIZE = 3, 8


def split(x):
    return x.view(*x.shape[:-1], -1, SIZE).transpose(1, 2)


def attend(query, key, value, **options):
    """As the models of Transformers do it."""
    context = functional.scaled_dot_product_attention(query, key, value, **options)
    context = context.reshape(context.shape[0], -1, query.shape[2], value.shape[-1]).transpose(1, 2).contiguous()
    return context.reshape(query.shape[0], query.shape[2], -1).contiguous()


class Attention(nn.Module):
    """Three projections, core attention and the output layer; ``use`` is done to what the projections give."""

    def __init__(self, ranks=(5, 5, 5), bias=True, use=None, attend=attend):
        super().__init__()
        settings = {"bias": bias, "dtype": torch.float64}
        self.q, self.k, self.v = (TTLinear(12, HEADS * SIZE, ranks=rank, **settings) for rank in ranks)
        self.o = TTLinear(HEADS * SIZE, 12, ranks=6, dtype=torch.float64)
        self.use, self.attend, self.options = use, attend, {}
        self.group = JoinedProjections()
        for place, layer in enumerate((self.q, self.k, self.v)):
            layer.join(self.group, place)
            if bias:
                nn.init.normal_(layer.bias)

    def set_codes(self, in_codes):
        config = SimpleNamespace(num_attention_heads=HEADS, _attn_implementation="sdpa")
        self.group.attention = config if in_codes else None

    def forward(self, x):
        wides = [layer(x) for layer in (self.q, self.k, self.v)]
        if self.use is not None:
            wides = [self.use(wide) for wide in wides]
        return self.o(self.attend(*map(split, wides), **self.options))


def random_input():
    return torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)


def results(block, x, in_codes, call=None):
    """Output and all gradients."""
    block.set_codes(in_codes)
    torch.manual_seed(1)
    y = (call or block)(x)
    grad = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    return [y, *torch.autograd.grad(y, [x, *trained], grad)]
