"""Layers that own compressed weights, with flat arguments like those of torch.nn."""

from hf_comera.modules.base import CompressedLayer, TensorTrainModule, compressed_layers
from hf_comera.modules.factorized_embedding import FactorizedEmbedding
from hf_comera.modules.tied import TiedEmbedding, TiedHead
from hf_comera.modules.tt_linear import TTLinear
from hf_comera.modules.ttm_embedding import TTMEmbedding

__all__ = [
    "CompressedLayer",
    "FactorizedEmbedding",
    "TTLinear",
    "TTMEmbedding",
    "TensorTrainModule",
    "TiedEmbedding",
    "TiedHead",
    "compressed_layers",
]
