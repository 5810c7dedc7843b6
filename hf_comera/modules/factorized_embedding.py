"""``FactorizedEmbedding``: a drop-in for ``nn.Embedding`` with a narrow table and a projection; it serves tied heads.

The table is ``V x R``, the projection ``R x H``. A tied head projects hidden states down first, so that logits are
products of width R.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from hf_comera.modules.base import CompressedLayer
from hf_comera.modules.ttm_embedding import TTMEmbedding
from hf_comera.ops.precision import without_autocast
from hf_comera.tt.decomposition import low_rank_factors

__all__ = ["FactorizedEmbedding", "check_width"]


class FactorizedEmbedding(CompressedLayer):
    """Rows of a ``(num_embeddings, embedding_dim)`` table that is the product of a narrow table and a projection.

    Args:
        num_embeddings: Rows of the table (the vocabulary).
        embedding_dim: Columns of the table (the hidden size).
        width: Columns of the narrow table.
        in_factors: Factors of the vocabulary, where the narrow table is held as TTM cores; as there.
        out_factors: Factors of ``width``, likewise.
        ranks: Ranks of these cores; None or none of them for a plain narrow table.
        padding_idx: Row without gradient from lookups. It starts at zero, unless the narrow table is in tensor-train
            form.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        ids ``(...) -> (..., embedding_dim)``; ``table`` is ``(num_embeddings, width)``, or a ``TTMEmbedding`` of these
        sizes; ``projection`` is ``(width, embedding_dim)``.

    Raises:
        ValueError: If ``width`` saves nothing, or factors or ranks do not fit.

    Source:
        ALBERT, arXiv:1909.11942, section 3.1, factorized embedding parameterization.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        width: int,
        *,
        in_factors: Sequence[int] | None = None,
        out_factors: Sequence[int] | None = None,
        ranks: int | Sequence[int] | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_width("width", width, num_embeddings, embedding_dim)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.width = width
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.table: nn.Parameter | TTMEmbedding
        if ranks:
            factors: dict[str, Any] = {"in_factors": in_factors, "out_factors": out_factors}
            self.table = TTMEmbedding(num_embeddings, width, ranks=ranks, padding_idx=padding_idx, **factors, **place)
            self.in_factors, self.out_factors = self.table.in_factors, self.table.out_factors
        else:
            self.table = nn.Parameter(torch.empty(num_embeddings, width, **place))
            self.in_factors, self.out_factors = (num_embeddings,), (width,)
        self.projection = nn.Parameter(torch.empty(width, embedding_dim, **place))
        self.reset_parameters()

    @property
    def train_of_table(self) -> TTMEmbedding | None:
        """The tensor train that the narrow table is, if it is one."""
        return self.table if isinstance(self.table, TTMEmbedding) else None

    def cores(self) -> list[Tensor]:
        """The table, or its cores, and the projection."""
        train = self.train_of_table
        return [*([self.table] if train is None else train.cores()), self.projection]

    def rank_gates(self) -> list[Tensor]:
        """The gates of the narrow table, where it is in tensor-train form."""
        return [] if self.train_of_table is None else self.train_of_table.rank_gates()

    def add_rank_gates(self) -> None:
        """Put gates on the bonds of the narrow table, where it is in tensor-train form."""
        if self.train_of_table is not None:
            self.train_of_table.add_rank_gates()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the narrow table; none where it is plain."""
        return () if self.train_of_table is None else self.train_of_table.ranks

    def weight_shape(self) -> tuple[int, int]:
        """``(num_embeddings, embedding_dim)``."""
        return self.num_embeddings, self.embedding_dim

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw new values (default deviation: that of ``nn.Embedding``)."""
        self.draw(1.0 if std is None else std)

    @torch.no_grad()
    def draw(self, std: float) -> None:
        """Draw new values; the entries of the implied table have deviation ``std``.

        So have those of the narrow table: a step of AdamW on it moves implied rows as far as one on a dense table.
        """
        table = self.table
        if isinstance(table, TTMEmbedding):
            table.draw(std)
        else:
            table.normal_(0.0, std)
        self.projection.normal_(0.0, 1 / math.sqrt(self.width))
        narrow, projection = self.narrow_table().float(), self.projection.float()
        energy = ((narrow.T @ narrow) * (projection @ projection.T)).sum()  # of the implied table
        self.projection.mul_(std * math.sqrt(self.num_dense_parameters) / energy.sqrt())
        if not isinstance(table, TTMEmbedding) and self.padding_idx is not None:
            table[self.padding_idx].zero_()

    def forward(self, x: Tensor, project: bool = False, bias: Tensor | None = None) -> Tensor:
        """Look up ids ``(...) -> (..., embedding_dim)``; with ``project``, logits of hidden states under the table.

        Rows have the dtype of the projection, also under autocast, as those of other embeddings have.
        """
        table = self.table
        if project:
            x = self.narrow(x)
            return table(x, project=True, bias=bias) if isinstance(table, TTMEmbedding) else linear(x, table, bias)
        rows = table(x) if isinstance(table, TTMEmbedding) else embedding(x, table, self.padding_idx)
        with without_autocast(rows):
            return rows @ self.projection

    def narrow(self, x: Tensor) -> Tensor:
        """Hidden states ``(..., embedding_dim) -> (..., width)``, which the narrow table makes logits of."""
        return linear(x, self.projection)

    def narrow_table(self) -> Tensor:
        """The narrow table ``(num_embeddings, width)``, differentiable; from cores it is built for this one use."""
        return self.table.dense() if isinstance(self.table, TTMEmbedding) else self.table

    def dense(self) -> Tensor:
        """The implied table ``(num_embeddings, embedding_dim)``, differentiable."""
        with without_autocast(self.projection):
            return self.narrow_table() @ self.projection

    @torch.no_grad()
    def load_dense(self, weight: Tensor, token_counts: Tensor | None = None) -> None:
        """Take over the nearest product to the table ``weight``, at this layer's width.

        Args:
            weight: The dense table.
            token_counts: How often each token occurs; the squared error of its row counts so many times. None: all
                rows count alike.

        Shape:
            ``weight (num_embeddings, embedding_dim)``, ``token_counts (num_embeddings,)``.

        Raises:
            ValueError: If a shape is another, or the counts are no counts.
        """
        if tuple(weight.shape) != self.weight_shape():
            raise ValueError(f"weight has shape {tuple(weight.shape)}, but this layer needs {self.weight_shape()}.")
        if token_counts is not None:
            _check_counts(token_counts, self.num_embeddings)
            token_counts = token_counts.to(weight.device)
        table, projection = low_rank_factors(weight, self.width, token_counts)
        # the projection as large as one that is drawn, since its rows are orthonormal
        scale, dtype = math.sqrt(self.embedding_dim / self.width), self.projection.dtype
        self.projection = nn.Parameter((projection * scale).to(dtype), requires_grad=self.projection.requires_grad)
        if isinstance(self.table, TTMEmbedding):
            self.table.load_dense(table / scale)
        else:
            self.table = nn.Parameter((table / scale).to(dtype), requires_grad=self.table.requires_grad)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, width={self.width}, padding_idx={self.padding_idx}"


def check_width(name: str, width: int, num_embeddings: int, embedding_dim: int) -> None:
    """Refuse a width at which narrow table and projection are no smaller than the table.

    Raises:
        ValueError: With ``name`` and the largest width that saves anything.
    """
    largest = (num_embeddings * embedding_dim - 1) // (num_embeddings + embedding_dim)
    if not 1 <= width <= largest:
        raise ValueError(
            f"{name}={width} is needed from 1 to {largest}: a wider factorization of a table of "
            f"{num_embeddings} x {embedding_dim} would be no smaller. Use for example "
            f"{max(1, min(embedding_dim // 4, largest))}."
        )


def _check_counts(counts: Tensor, num_embeddings: int) -> None:
    """Refuse what is no count for each row."""
    if not isinstance(counts, Tensor) or tuple(counts.shape) != (num_embeddings,):
        found = f"shape {tuple(counts.shape)}" if isinstance(counts, Tensor) else f"type {type(counts).__name__}"
        raise ValueError(
            f"token_counts has {found}, but is needed as a tensor of shape ({num_embeddings},), a count for each row "
            f"of the table: torch.bincount(ids, minlength={num_embeddings})."
        )
    if not torch.isfinite(counts).all() or (counts < 0).any() or not (counts > 0).any():
        raise ValueError(
            f"token_counts has entries from {counts.min().item()} to {counts.max().item()}, but finite counts of at "
            "least 0 are needed, not all of them 0. Use torch.bincount(ids, minlength=number of tokens)."
        )
