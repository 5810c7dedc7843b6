"""``TTLinear``: a drop-in for ``nn.Linear`` (and GPT-2's ``Conv1D``) whose weight is a tensor train."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_comera.modules.base import TensorTrainModule, removed_output
from hf_comera.modules.halves_bank import HalvesBank
from hf_comera.modules.joined import JoinedProjections
from hf_comera.modules.planned_path import planned_path
from hf_comera.modules.stamp import can_keep
from hf_comera.modules.unwritten import Unwritten, can_stand_in
from hf_comera.modules.unwritten_heads import UnwrittenHeads, is_worth_codes
from hf_comera.modules.wide_hidden import WideHidden, pays
from hf_comera.ops.cuda.dispatch import kernels_serve
from hf_comera.ops.halves import layer_halves
from hf_comera.ops.low_rank_linear import low_rank_linear
from hf_comera.ops.path_linear import dense_linear, path_linear
from hf_comera.ops.precision import autocast_dtype, chain_dtype, without_autocast
from hf_comera.ops.rank_activation import check_rank_activation, shrinkage
from hf_comera.ops.tt_linear import activate, bias_as_rank, from_code, to_code
from hf_comera.tt.contraction import apply_parts, build_parts
from hf_comera.tt.cores import contract_left, contract_right, core_shapes, draw_cores
from hf_comera.tt.decomposition import tt_svd
from hf_comera.tt.path import ContractionPath
from hf_comera.tt.shapes import check_factors, factorize, useful_ranks

__all__ = ["TTLinear"]


class TTLinear(TensorTrainModule):
    """``y = x W + bias``, where W is stored as tensor-train cores and never formed.

    With ``rank_activation``, ``y = act(x left) right + bias``, where ``left`` and ``right`` are the halves that the
    input cores and the output cores contract to. Such a layer has no dense weight.

    Args:
        in_features: Size of the last axis of ``x``.
        out_features: Size of the last axis of ``y``.
        in_factors: Factors of ``in_features``, one core each; a larger product pads. Default: three, balanced.
        out_factors: Factors of ``out_features``, likewise.
        ranks: One rank for all bonds (clipped to what is useful), or one per inner bond; all of them zero for a layer
            that rank pruning has removed.
        bias: Whether there is a bias.
        transposed: Whether ``weight`` is laid out ``(in, out)``, as in ``transformers.pytorch_utils.Conv1D``.
        rank_activation: ``"silu"``, ``"gelu"`` (exact) or None: the nonlinearity between the halves.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        ``(..., in_features) -> (..., out_features)``; core k is ``(r_{k-1}, n_k, r_k)``, ``r_0 = r_{2d} = 1``.

    Raises:
        ValueError: If factors do not cover their sizes, a rank is not positive, or ``rank_activation`` is unknown.

    Source:
        CoMERA, arXiv:2405.14377, TT linear layers (input factors first); rank activation: CoLA, arXiv:2502.10940.
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
        rank_activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_rank_activation(rank_activation)
        self.rank_activation = rank_activation
        self.in_features, self.out_features, self.transposed = in_features, out_features, transposed
        # the largest factors go to the ends of the train, where one neighbouring rank is 1 and entries are cheap
        self.in_factors = tuple(in_factors or factorize(in_features, 3)[::-1])
        self.out_factors = tuple(out_factors or factorize(out_features, 3))
        check_factors("in_factors", self.in_factors, in_features)
        check_factors("out_factors", self.out_factors, out_features)
        factors = (*self.in_factors, *self.out_factors)
        self._register_cores(core_shapes(factors, useful_ranks(factors, ranks)), device, dtype)
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.join_bank(HalvesBank())
        self.joined: JoinedProjections | None = None
        self.is_wide = False
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """Draw new cores (default deviation: that of ``nn.Linear``), and zero the bias."""
        self.draw((3 * self.in_features) ** -0.5 if std is None else std)
        if self.bias is not None and not self.bias.is_meta:
            self.bias.zero_()

    @torch.no_grad()
    def draw(self, std: float) -> None:
        """Draw new cores; every entry of the implied matrix has deviation ``std``.

        A rank activation shrinks the code; the right half makes up for it, for inputs of deviation one.
        """
        draw_cores(self.cores(), std, len(self.in_factors))
        for gate in self.rank_gates():
            gate.fill_(1)
        if self.rank_activation is not None and not (self.core_0.is_meta or self.is_removed):
            in_cores, out_cores = self.cores()[: len(self.in_factors)], self.cores()[len(self.in_factors) :]
            code_deviation = contract_left(in_cores)[-1].square().sum(0).mean().sqrt().item()
            gain = 1 / shrinkage(self.rank_activation, code_deviation)
            for core in out_cores:
                core.mul_(gain ** (1 / len(out_cores)))

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in_features) -> (..., out_features)``."""
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but its last axis must be in_features={self.in_features}."
            )
        if self.is_removed:
            if (heads := self._code_heads(x)) is not None:
                return UnwrittenHeads.of_bias(x, self.out_features, self.bias, heads)
            return removed_output(x, self.out_features, self.bias)
        if not isinstance(x, Unwritten) and (path := self._other_path(x)) is not None:
            return self._along(path, x)
        left, right = self._halves(autocast_dtype(x))
        if isinstance(x, Unwritten) and not x.stays_unwritten(left):
            x = x.real()
        is_wide = self.is_wide and not self._forward_hooks and pays(x, left, self.out_features)
        if self._in_one_call(x) and not is_wide:
            return low_rank_linear(x, left, right, self.bias, self.rank_activation)
        if isinstance(x, Unwritten):
            code = x.code(left)
        else:
            code = to_code(x, left) if self.joined is None else self.joined.code(self, x, left)
        code, heads = activate(code, self.rank_activation), self._code_heads(x)
        code, right, bias = bias_as_rank(code, right, self.bias, self.middle_rank, always=heads is not None)
        if heads is not None:
            cache = self.joined and self.joined.cache_for(x.shape[:-1].numel(), self.out_features)
            return UnwrittenHeads.of(code, right, heads, cache)
        if is_wide:
            return WideHidden.of(code, right, bias)
        return from_code(code, right, bias)

    def _in_one_call(self, x: Tensor) -> bool:
        """Whether both products are one call of a kernel: for a plain tensor on a GPU, of no concern to siblings."""
        return kernels_serve(x.device) and not isinstance(x, Unwritten) and not self.has_siblings

    def _code_heads(self, x: Tensor) -> int | None:
        """:meth:`code_heads` for the rows of ``x``; None also if no stand-in for the output can be."""
        return self.code_heads(x.shape[0] * x.shape[1]) if x.ndim == 3 and can_stand_in(x) else None

    @property
    def has_siblings(self) -> bool:
        """Whether other layers may share the product into the rank space with this one."""
        return self.joined is not None and self.joined.num_members > 1

    @property
    def middle_rank(self) -> int:
        """Numbers of the code, without padding."""
        return self.ranks[len(self.in_factors) - 1]

    def path(self, rows: int, dtype: torch.dtype, *, training: bool) -> ContractionPath:
        """The contraction path that the layer takes for ``rows`` rows of input, once ranks are rounded up.

        It is planned for assumed speeds of a device, so that it is the same in every process and after a restart.
        Where attention takes the code as it is, there has to be one: no path of its own saves as much.
        """
        sizes = (self.in_factors, self.out_factors, self.in_features, self.out_features)
        best, two_sided = planned_path(sizes, self.ranks, max(1, rows), dtype, self.core_0.is_cuda, training=training)
        if self.rank_activation is not None or (best is not two_sided and self.code_heads(rows) is not None):
            return two_sided
        return best

    def joins(self, x: Tensor) -> bool:
        """Whether the layer needs the code of ``x``, which siblings can make together."""
        return not self.is_removed and self._other_path(x) is None

    def code_heads(self, rows: int) -> int | None:
        """Heads of the attention that takes the code as it is; None if there is none, or ``rows`` rows are few.

        Of tokens that follow codes in a cache a single row is enough.
        """
        if self.joined is None or self.core_0.device.type not in ("cpu", "meta"):
            return None
        worth = is_worth_codes(rows, self.out_features) or self.joined.is_cached
        return self.joined.num_code_heads if worth else None

    def _other_path(self, x: Tensor) -> ContractionPath | None:
        """The path to take, if it is not the two-sided one; None also in compiled code, which cannot plan."""
        if self.rank_activation is not None or torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return None
        training = torch.is_grad_enabled() and (x.requires_grad or self.core_0.requires_grad)
        path = self.path(x.numel() // self.in_features, autocast_dtype(x), training=training)
        return None if path.kind == "two-sided" else path

    def _along(self, path: ContractionPath, x: Tensor) -> Tensor:
        """What the layer computes, along a path that is not two-sided; its parts are kept where nothing trains."""
        dtype = autocast_dtype(x)
        if not torch.is_grad_enabled() and can_keep(self.train_parameters()):
            cores = [core.to(chain_dtype(core)) for core in self.gated_cores()]
            parts = self.halves_bank.kept(self, dtype, path.label, lambda: build_parts(cores, path, dtype))
            with without_autocast(x):
                y = apply_parts(x.to(dtype), parts, path)
                return y if self.bias is None else y + self.bias.to(dtype)
        if path.kind == "dense":
            return dense_linear(x, *self._halves(dtype), self.bias)
        return path_linear(x, self.gated_cores(), path, self.bias)

    def _halves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``left (R, in_features)`` and ``right (R, out_features)`` in ``dtype``; R is the padded middle rank."""
        if can_keep(self.train_parameters()):
            return self.halves_bank.halves(self, dtype)
        with without_autocast(self.core_0):
            left, right = layer_halves(self.gated_cores(), len(self.in_factors), self.in_features, self.out_features)
            return left.to(dtype), right.to(dtype)

    def join_bank(self, bank: HalvesBank) -> None:
        """Have the halves built together with those of the other members of ``bank``, and kept there."""
        self.halves_bank = bank
        bank.add(self)

    def join(self, group: JoinedProjections, place: int) -> None:
        """Share a product with the other members of ``group``, of which this is number ``place`` to be called."""
        self.joined, self._place = group, place
        group.add(self, place)

    def train(self, mode: bool = True) -> "TTLinear":
        """Set the training mode, and free what was kept."""
        self.halves_bank.drop(self)
        if self.joined is not None:
            self.joined.reset()
        return super().train(mode)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, whole or from a pickle, joins the copies of its fellows."""
        super().__setstate__(state)
        self.halves_bank.add(self)
        if self.joined is not None:
            self.joined.add(self, self._place)

    def weight_shape(self) -> tuple[int, int]:
        """``(out_features, in_features)``, or ``(in_features, out_features)`` if ``transposed``."""
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.transposed else shape

    def expected_factors(self) -> list[int]:
        """Input factors, then output factors."""
        return [*self.in_factors, *self.out_factors]

    def dense(self) -> Tensor:
        """The implied weight, in the shape of :meth:`weight_shape`; ``nn.Linear`` with it computes the same.

        Raises:
            ValueError: If there is a rank activation, with which no weight is implied.
        """
        if self.rank_activation is not None:
            raise ValueError(
                f"This TTLinear has rank_activation={self.rank_activation!r} between its halves, so no dense weight "
                "computes the same. Call the layer itself, or use rank_activation=None, with which there is one."
            )
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
            ValueError: If ``weight`` has another shape, there is a rank activation, or the layer was removed.
        """
        if self.rank_activation is not None:
            raise ValueError(
                f"This TTLinear has rank_activation={self.rank_activation!r} between its halves, which a dense "
                "weight does not have: its decomposition would compute something else. Use rank_activation=None."
            )
        if tuple(weight.shape) != self.weight_shape():
            raise ValueError(f"weight has shape {tuple(weight.shape)}, but this layer needs {self.weight_shape()}.")
        self._check_ranks_left()
        matrix = weight if self.transposed else weight.T
        self.load_cores(tt_svd(matrix, self.in_factors, self.out_factors, self.ranks))
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().clone())

    def extra_repr(self) -> str:
        """Sizes, factors and ranks, for ``print(model)``."""
        activation = "" if self.rank_activation is None else f", rank_activation={self.rank_activation!r}"
        return (
            f"{self.in_features}, {self.out_features}, in_factors={self.in_factors}, out_factors={self.out_factors}, "
            f"ranks={self.ranks}, bias={self.bias is not None}{activation}"
        )
