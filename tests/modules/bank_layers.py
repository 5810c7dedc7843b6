"""Layers that share a bank of halves, and the same without any bank."""

import torch
from torch import nn

from hf_comera.modules import TTLinear
from hf_comera.modules.halves_bank import HalvesBank
from hf_comera.ops import tt_linear


def layers(ranks=(5, 5, 5), dtype=torch.float64):
    """A stack of layers that share a bank."""
    bank = HalvesBank()
    stack = nn.Sequential(*(TTLinear(12, 12, ranks=rank, dtype=dtype) for rank in ranks))
    for layer in stack:
        layer.join_bank(bank)
    return stack


def reference(stack, x):
    """The stack without any bank."""
    for layer in stack:
        x = tt_linear(x, layer.gated_cores(), len(layer.in_factors), layer.bias, layer.out_features)
    return x
