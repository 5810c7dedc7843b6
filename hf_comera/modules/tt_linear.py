"""``TTLinear``: a drop-in for ``nn.Linear`` (and GPT-2's ``Conv1D``) whose weight is a tensor train."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_comera.modules.base import TensorTrainModule, removed_output
from hf_comera.modules.halves_cache import HalvesCache, can_cache
from hf_comera.ops.halves import RANK_MULTIPLE, layer_halves, padded_rank
from hf_comera.ops.low_rank import bias_as_rank, dense_linear, from_latent, low_rank_linear
from hf_comera.ops.precision import autocast_dtype, chain_dtype, without_autocast
from hf_comera.ops.tiled_mlp import HiddenInput
from hf_comera.tt import planner
from hf_comera.tt.cores import contract_left, contract_right, core_shapes, draw_cores
from hf_comera.tt.decomposition import tt_svd
from hf_comera.tt.shapes import check_factors, factorize, useful_ranks

__all__ = ["TTLinear"]


class TTLinear(TensorTrainModule):
    """``y = x W + bias``, where W is stored as tensor-train cores and never formed.

    Args:
        in_features: Size of the last axis of ``x``.
        out_features: Size of the last axis of ``y``.
        in_factors: Factors of ``in_features``, one core each; a larger product pads. Default: three, balanced.
        out_factors: Factors of ``out_features``, likewise.
        ranks: One rank for all bonds (clipped to what is useful), or one per inner bond; all of them zero for a layer
            that rank pruning has removed.
        bias: Whether there is a bias.
        transposed: Whether ``weight`` is laid out ``(in, out)``, as in ``transformers.pytorch_utils.Conv1D``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        ``(..., in_features) -> (..., out_features)``; core k is ``(r_{k-1}, n_k, r_k)``, ``r_0 = r_{2d} = 1``.

    Raises:
        ValueError: If factors do not cover their sizes, or a rank is not positive.

    Source:
        CoMERA, arXiv:2405.14377, TT linear layers (input factors first).
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        in_factors: Sequence[int] | None = None,
        out_factors: Sequence[int] | None = None,
        ranks: int | Sequence[int] = 30,
        bias: bool = True,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.transposed = in_features, out_features, transposed
        # the largest factors go to the two ends, where one neighbouring rank is 1 and entries are cheap
        self.in_factors = tuple(in_factors or factorize(in_features, 3)[::-1])
        self.out_factors = tuple(out_factors or factorize(out_features, 3))
        check_factors("in_factors", self.in_factors, in_features)
        check_factors("out_factors", self.out_factors, out_features)
        factors = (*self.in_factors, *self.out_factors)
        self._register_cores(core_shapes(factors, useful_ranks(factors, ranks)), device, dtype)
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.join_cache(HalvesCache())
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """Draw new cores (default deviation: that of ``nn.Linear``), and zero the bias."""
        self.draw((3 * self.in_features) ** -0.5 if std is None else std)
        if self.bias is not None and not self.bias.is_meta:
            self.bias.zero_()

    @torch.no_grad()
    def draw(self, std: float) -> None:
        """Draw new cores; every entry of the implied matrix has deviation ``std``."""
        draw_cores(self.cores(), std, len(self.in_factors))
        for gate in self.rank_gates():
            gate.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in_features) -> (..., out_features)``."""
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but its last axis must be in_features={self.in_features}."
            )
        if self.is_removed:
            return removed_output(x, self.out_features, self.bias)
        if self.prefers_dense:
            return self._dense_product(x)
        left, right = self.halves(autocast_dtype(x))
        return low_rank_linear(x, left, right, self.bias, rank=self.middle_rank)

    def from_latent(self, latent: Tensor, right: Tensor) -> Tensor:
        """``(..., R) -> (..., out_features)``: the up-projection by the right half, and the bias."""
        return from_latent(*bias_as_rank(latent, right, self.bias, self.middle_rank))

    def hidden_input(self, latent: Tensor, right: Tensor) -> HiddenInput:
        """The same of ``latent``, ``(T, R)``, for an operator that makes it a few rows at a time."""
        latent, right, bias = bias_as_rank(latent, right, self.bias, self.middle_rank)
        return HiddenInput(latent, right, None if bias is None else bias.to(latent.dtype))

    @property
    def prefers_dense(self) -> bool:
        """Whether the layer takes the dense path: a matter of sizes and ranks, so decided again after each pruning."""
        return planner.prefers_dense(self.in_features, self.out_features, padded_rank(self.middle_rank))

    def _dense_product(self, x: Tensor) -> Tensor:
        """The output along the dense path; its matrix is cached where nothing trains."""
        dtype = autocast_dtype(x)
        if torch.is_grad_enabled() or not can_cache(self.tt_parameters()):
            return dense_linear(x, *self.halves(dtype), self.bias)
        with without_autocast(x):
            weight, bias = self.halves_cache.dense_matrix(self, dtype), self.bias
            return nn.functional.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

    @property
    def middle_rank(self) -> int:
        """Numbers of the latent, without padding."""
        return self.ranks[len(self.in_factors) - 1]

    def halves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``left (R, in_features)`` and ``right (R, out_features)`` in ``dtype``; R is the padded middle rank.

        A removed layer has zeros of one padded rank.
        """
        if self.is_removed:
            zeros = self.core_0.new_zeros(RANK_MULTIPLE, self.in_features + self.out_features, dtype=dtype)
            left, right = zeros.split([self.in_features, self.out_features], dim=1)
            return left, right
        if can_cache(self.tt_parameters()):
            return self.halves_cache.halves(self, dtype)
        with without_autocast(self.core_0):
            left, right = layer_halves(self.gated_cores(), len(self.in_factors), self.in_features, self.out_features)
            return left.to(dtype), right.to(dtype)

    def join_cache(self, cache: HalvesCache) -> None:
        """Have the halves built together with those of the other members of ``cache``, and kept there."""
        self.halves_cache = cache
        cache.reset(self)

    def train(self, mode: bool = True) -> "TTLinear":
        """Set the training mode, and free what was kept."""
        self.halves_cache.reset(self)
        return super().train(mode)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, whole or from a pickle, joins the copies of its fellows."""
        super().__setstate__(state)
        self.halves_cache.reset(self)

    def weight_shape(self) -> tuple[int, int]:
        """``(out_features, in_features)``, or ``(in_features, out_features)`` if ``transposed``."""
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.transposed else shape

    def expected_factors(self) -> list[int]:
        """Input factors, then output factors."""
        return [*self.in_factors, *self.out_factors]

    def dense(self) -> Tensor:
        """The implied weight, in the shape of :meth:`weight_shape`; ``nn.Linear`` with it computes the same."""
        if self.is_removed:
            return self.core_0.new_zeros(self.weight_shape())
        cores = [core.to(chain_dtype(core)) for core in self.gated_cores()]
        left = contract_left(cores[: len(self.in_factors)])[-1][: self.in_features]
        right = contract_right(cores[len(self.in_factors) :])[0][:, : self.out_features]
        matrix = (left @ right).to(self.core_0.dtype)
        return matrix if self.transposed else matrix.T

    @torch.no_grad()
    def load_dense(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Replace the cores by the TT-SVD of ``weight`` (laid out as :meth:`weight_shape`), at this layer's ranks.

        Raises:
            ValueError: If ``weight`` has another shape, or the layer was removed.
        """
        if tuple(weight.shape) != self.weight_shape():
            raise ValueError(f"weight has shape {tuple(weight.shape)}, but this layer needs {self.weight_shape()}.")
        self._check_ranks_left()
        matrix = weight if self.transposed else weight.T
        self.load_cores(tt_svd(matrix, self.in_factors, self.out_factors, self.ranks))
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().clone())

    def extra_repr(self) -> str:
        """Sizes, factors and ranks, for ``print(model)``."""
        return (
            f"{self.in_features}, {self.out_features}, in_factors={self.in_factors}, out_factors={self.out_factors}, "
            f"ranks={self.ranks}, bias={self.bias is not None}"
        )
