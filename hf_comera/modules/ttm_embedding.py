"""``TTMEmbedding``: a drop-in for ``nn.Embedding`` whose table is held as TTM cores; it also serves tied heads."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_comera.modules.base import TensorTrainModule, removed_output
from hf_comera.modules.halves_cache import Cached, can_cache
from hf_comera.ops import ttm_lookup, ttm_project
from hf_comera.ops.precision import autocast_input, without_autocast
from hf_comera.ops.ttm_embedding import check_ids, half_tables, look_up_in_tables, project_on_tables
from hf_comera.tt.cores import core_shapes, draw_cores
from hf_comera.tt.decomposition import ttm_svd
from hf_comera.tt.shapes import balanced_factors, check_factors, factorize, useful_ranks

__all__ = ["TTMEmbedding"]


class TTMEmbedding(TensorTrainModule):
    """Rows of a ``(num_embeddings, embedding_dim)`` table that is stored as TTM cores and never formed.

    Args:
        num_embeddings: Rows of the table (the vocabulary).
        embedding_dim: Columns of the table (the hidden size).
        in_factors: Factors of the vocabulary, one core each; a larger product pads. Default: four, balanced.
        out_factors: Factors of the hidden size, as many.
        ranks: One rank for all bonds (clipped to what is useful), or one per inner bond; all of them zero for a table
            that rank pruning has removed.
        padding_idx: Row without gradient. Unlike in ``nn.Embedding`` it does not start at zero: cores are shared.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        ids ``(...) -> (..., embedding_dim)``; core k is ``(r_{k-1}, v_k, h_k, r_k)``, ``r_0 = r_d = 1``.

    Raises:
        ValueError: If factors do not cover their sizes or differ in number, or a rank is not positive.

    Source:
        CoMERA, arXiv:2405.14377, TTM embedding tables.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        in_factors: Sequence[int] | None = None,
        out_factors: Sequence[int] | None = None,
        ranks: int | Sequence[int] = 30,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        order = len(in_factors or out_factors or (1,) * 4)
        self.in_factors = tuple(in_factors or factorize(num_embeddings, order))
        self.out_factors = tuple(out_factors or balanced_factors(embedding_dim, order))
        check_factors("in_factors", self.in_factors, num_embeddings)
        check_factors("out_factors", self.out_factors, embedding_dim)
        if len(self.in_factors) != len(self.out_factors):
            raise ValueError(
                f"in_factors={self.in_factors} and out_factors={self.out_factors} differ in number, but each core has "
                f"one of both. Use for example out_factors={factorize(embedding_dim, len(self.in_factors))}."
            )
        sizes = [v * h for v, h in zip(self.in_factors, self.out_factors, strict=True)]
        flat = core_shapes(sizes, useful_ranks(sizes, ranks))
        pairs = zip(flat, self.in_factors, self.out_factors, strict=True)
        self._register_cores([(left, v, h, right) for (left, _, right), v, h in pairs], device, dtype)
        self._tables = Cached()
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw new cores (default deviation: that of ``nn.Embedding``)."""
        self.draw(1.0 if std is None else std)

    @torch.no_grad()
    def draw(self, std: float) -> None:
        """Draw new cores; the entries of the implied table have deviation ``std``."""
        draw_cores(self.cores(), std)
        for gate in self.rank_gates():
            gate.fill_(1)

    def forward(self, x: Tensor, project: bool = False, bias: Tensor | None = None) -> Tensor:
        """Look up ids ``(...) -> (..., embedding_dim)``; with ``project``, logits of hidden states under the table.

        Tied heads come through this same call, so that hooks of FSDP2 and Accelerate on the embedding see both uses.
        """
        if self.is_removed:
            if project:
                return removed_output(x, self.num_embeddings, bias)
            return self.core_0.new_zeros(*x.shape, self.embedding_dim)
        if torch.compiler.is_exporting() and not self.training:
            return self._by_torch_alone(x, project, bias)
        parameters = self.tt_parameters()
        if not torch.is_grad_enabled() and can_cache(parameters):
            return self._from_tables(parameters, x, project, bias)
        if project:
            return ttm_project(x, self.gated_cores(), self.num_embeddings, bias)
        return ttm_lookup(x, self.gated_cores(), self.num_embeddings, self.embedding_dim, self.padding_idx)

    def _from_tables(self, parameters: list[Tensor], x: Tensor, project: bool, bias: Tensor | None) -> Tensor:
        """The same without a gradient: half tables are kept from call to call."""
        x = autocast_input(x) if project else x
        with without_autocast(x):
            tables = self._tables.get(parameters, lambda: half_tables(self.gated_cores()))
            if project:
                return project_on_tables(x, tables, self.num_embeddings, bias)
            check_ids(x, self.num_embeddings)
            return look_up_in_tables(x, tables, self.num_embeddings, self.embedding_dim, self.core_0.dtype)

    def _by_torch_alone(self, x: Tensor, project: bool, bias: Tensor | None) -> Tensor:
        """The same for programs that ``torch.export`` makes: in operations that every runtime knows, as ONNX's do.

        Ids are not checked there, and a head makes the whole table: its slices would be a graph of hundreds of nodes.
        """
        x = autocast_input(x) if project else x
        with without_autocast(x):
            if project:
                return linear(x, self.dense().to(x.dtype), None if bias is None else bias.to(x.dtype))
            left, right, *_ = half_tables(self.gated_cores())
            ids = x.reshape(-1).long()
            row, column = ids // right.shape[0], ids % right.shape[0]
            rows = torch.bmm(left.index_select(0, row), right.index_select(0, column))
            rows = rows.flatten(1)[:, : self.embedding_dim].to(self.core_0.dtype)
            return rows.reshape(*x.shape, self.embedding_dim)

    def train(self, mode: bool = True) -> "TTMEmbedding":
        """Set the training mode, and free the half tables that were kept."""
        self._tables.drop()
        return super().train(mode)

    def weight_shape(self) -> tuple[int, int]:
        """``(num_embeddings, embedding_dim)``."""
        return self.num_embeddings, self.embedding_dim

    def expected_factors(self) -> list[int]:
        """Vocabulary and hidden factor of each core."""
        return [size for pair in zip(self.in_factors, self.out_factors, strict=True) for size in pair]

    def dense(self) -> Tensor:
        """The implied table ``(num_embeddings, embedding_dim)``, differentiable."""
        if self.is_removed:
            return self.core_0.new_zeros(self.weight_shape())
        left_AHR, right_BRK, *_ = half_tables(self.gated_cores())
        table = torch.einsum("ahr,brk->abhk", left_AHR, right_BRK)
        table = table.reshape(left_AHR.shape[0] * right_BRK.shape[0], -1)
        return table[: self.num_embeddings, : self.embedding_dim].to(self.core_0.dtype)

    @torch.no_grad()
    def load_dense(self, weight: Tensor) -> None:
        """Replace the cores by the TT-SVD of the table ``weight``, at this layer's ranks.

        Raises:
            ValueError: If ``weight`` has another shape, or the layer was removed.
        """
        if tuple(weight.shape) != self.weight_shape():
            raise ValueError(f"weight has shape {tuple(weight.shape)}, but this layer needs {self.weight_shape()}.")
        self._check_ranks_left()
        self.load_cores(ttm_svd(weight, self.in_factors, self.out_factors, self.ranks))

    def extra_repr(self) -> str:
        """Sizes, factors and ranks, for ``print(model)``."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, in_factors={self.in_factors}, "
            f"out_factors={self.out_factors}, ranks={self.ranks}, padding_idx={self.padding_idx}"
        )
