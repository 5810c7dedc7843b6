"""Heads and embeddings that compute with the cores of a compressed embedding which they do not own.

The reference is hidden from ``nn.Module``, so the cores appear once in ``parameters()`` and in checkpoints. There is
nothing to tie again after loading, and deep copies and pickles keep the link.
"""

from __future__ import annotations

from torch import Tensor, nn

from hf_comera.modules.factorized_embedding import FactorizedEmbedding
from hf_comera.modules.ttm_embedding import TTMEmbedding

__all__ = ["TiedEmbedding", "TiedHead"]


class _Tied(nn.Module):
    """Holds the unregistered reference."""

    _source: tuple[TTMEmbedding | FactorizedEmbedding]

    def __init__(self, source: TTMEmbedding | FactorizedEmbedding) -> None:
        super().__init__()
        self.link(source)

    def link(self, source: TTMEmbedding | FactorizedEmbedding) -> None:
        """Compute with ``source`` from now on."""
        self.__dict__["_source"] = (source,)  # a tuple in __dict__ escapes nn.Module's registration

    @property
    def source(self) -> TTMEmbedding | FactorizedEmbedding:
        """The embedding that owns the cores."""
        return self._source[0]

    @property
    def weight(self) -> Tensor:
        """The lazy dense table of the embedding."""
        return self.source.weight


class TiedHead(_Tied):
    """Output head whose weight is the table of a compressed embedding: ``logits = x @ table.T + bias``.

    Args:
        source: The embedding that owns the cores.
        bias: ``(num_embeddings,)`` or None; the parameter object of the head that this one replaces.

    Shape:
        ``(..., embedding_dim) -> (..., num_embeddings)``.
    """

    bias: Tensor | None

    def __init__(self, source: TTMEmbedding | FactorizedEmbedding, bias: nn.Parameter | None = None) -> None:
        super().__init__(source)
        self.register_parameter("bias", bias)
        self.in_features, self.out_features = source.embedding_dim, source.num_embeddings

    def reset_parameters(self) -> None:
        """Zero the bias, the only parameter of this layer's own."""
        if self.bias is not None and not self.bias.is_meta:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., embedding_dim) -> (..., num_embeddings)``."""
        return self.source(x, project=True, bias=self.bias)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, tied"


class TiedEmbedding(_Tied):
    """Embedding that shares all cores with another one, as T5's decoder does with its encoder.

    Shape:
        ids ``(...) -> (..., embedding_dim)``.
    """

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.source.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Columns of the table."""
        return self.source.embedding_dim

    @property
    def padding_idx(self) -> int | None:
        """Row without gradient."""
        return self.source.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """``(...) -> (..., embedding_dim)``."""
        return self.source(ids)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tied"
