"""Differentiable operators: schema, fake, plain-torch reference and backward; one operator a file."""

from hf_comera.ops.cuda.switch import use_kernels
from hf_comera.ops.low_rank import dense_linear, low_rank_linear, tt_linear
from hf_comera.ops.ttm_embedding import ttm_lookup, ttm_project

__all__ = [
    "dense_linear",
    "low_rank_linear",
    "tt_linear",
    "ttm_lookup",
    "ttm_project",
    "use_kernels",
]
