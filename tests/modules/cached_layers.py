"""Layers that share a cache of halves, and the same without any cache."""

import torch
from torch import nn

from hf_comera.modules import TTLinear
from hf_comera.modules.halves_cache import HalvesCache
from hf_comera.ops import tt_linear


def layers(ranks=(5, 5, 5), dtype=torch.float64):
    """A stack of layers that share a cache."""
    cache = HalvesCache()
    stack = nn.Sequential(*(TTLinear(12, 12, ranks=rank, dtype=dtype) for rank in ranks))
    for layer in stack:
        layer.join_cache(cache)
    return stack


def reference(stack, x):
    """The stack without any cache."""
    for layer in stack:
        x = tt_linear(x, layer.gated_cores(), len(layer.in_factors), layer.bias, layer.out_features)
    return x
