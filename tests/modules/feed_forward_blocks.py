"""A feed-forward block of TT linears, its input, and all its results."""

import torch
from torch import nn
from torch.nn import functional

from hf_comera.modules import TTLinear


class Block(nn.Module):
    """A feed-forward block, plain or gated."""

    def __init__(self, act=functional.gelu, gated=False, dropout=0.0, dtype=torch.float64):
        super().__init__()
        settings = {"ranks": 5, "dtype": dtype}
        self.up = TTLinear(8, 24, **settings)
        self.gate = TTLinear(8, 24, bias=False, **settings) if gated else None
        self.down = TTLinear(24, 8, **settings)
        self.act, self.dropout = act, nn.Dropout(dropout)
        self.set_wide(True)

    def set_wide(self, is_wide):
        self.up.is_wide = is_wide
        if self.gate is not None:
            self.gate.is_wide = is_wide

    def forward(self, x):
        hidden = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden))


def random_input(rows=9, dtype=torch.float64):
    return torch.randn(2, rows, 8, dtype=dtype, requires_grad=True)


def results(block, x, is_wide, call=None):
    """Output and all gradients."""
    block.set_wide(is_wide)
    torch.manual_seed(1)
    y = (call or block)(x)
    grad = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    return [y, *torch.autograd.grad(y, [x, *block.parameters()], grad)]
