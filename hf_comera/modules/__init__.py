"""Layers that own tensor-train parameters, with flat arguments like those of torch.nn."""

from hf_comera.modules.base import TensorTrainModule
from hf_comera.modules.tied import TiedEmbedding, TiedHead
from hf_comera.modules.tt_linear import TTLinear
from hf_comera.modules.ttm_embedding import TTMEmbedding

__all__ = ["TTLinear", "TTMEmbedding", "TensorTrainModule", "TiedEmbedding", "TiedHead"]
