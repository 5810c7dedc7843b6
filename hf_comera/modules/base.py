"""What compressed layers have: a lazy dense weight; in tensor-train form also flat cores and rank gates, and ranks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_comera.modules.lazy_weight import lazy_weight
from hf_comera.ops.precision import autocast_input
from hf_comera.tt.gates import scale_cores

__all__ = ["CompressedLayer", "TensorTrainModule", "compressed_layers", "removed_output"]


class CompressedLayer(nn.Module):
    """Base of the layers that stand for a dense weight and keep the factors of a product in its place.

    Reports, surgery and checkpoints know compressed layers by it; ranks are trained of tensor trains alone.
    """

    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]

    def cores(self) -> list[Tensor]:
        """The factors of the product, first to last."""
        raise NotImplementedError

    def rank_gates(self) -> list[Tensor]:
        """The gates of the inner bonds, first to last; none unless ranks are being trained."""
        return []

    def add_rank_gates(self) -> None:
        """Put a gate of ones on every inner bond, in float32 (float64 beside such cores); nothing computed changes."""
        raise NotImplementedError

    def train_parameters(self) -> list[Tensor]:
        """Cores and gates: all of which the weight is made."""
        return self.cores() + self.rank_gates()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the inner bonds."""
        raise NotImplementedError

    @property
    def num_core_parameters(self) -> int:
        """Entries of all that the layer keeps in place of the weight, gates not counted."""
        return sum(core.numel() for core in self.cores())

    @property
    def num_dense_parameters(self) -> int:
        """Entries of the dense weight that the layer stands for."""
        return math.prod(self.weight_shape())

    @property
    def weight(self) -> Tensor:
        """The dense weight, lazily: nothing is built until somebody computes with it."""
        if torch.compiler.is_compiling():  # the proxy cannot be traced; an unused dense matrix is dead code there
            return self.dense()
        return lazy_weight(self)

    def weight_shape(self) -> tuple[int, int]:
        """Shape of the dense weight that this layer replaces."""
        raise NotImplementedError

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw new values; the entries of the implied matrix have deviation ``std`` (default: that of torch.nn)."""
        raise NotImplementedError

    def draw(self, std: float) -> None:
        """Draw new values; the entries of the implied matrix have deviation ``std``. Nothing else changes."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The dense weight, differentiable, in the layout of the layer that this one replaces."""
        raise NotImplementedError

    def load_dense(self, weight: Tensor) -> None:
        """Take over ``weight`` (of shape :meth:`weight_shape`) as well as this layer's ranks can."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The empty tensor that a checkpoint has under the name of the dense weight is no part of the state."""
        if (guard := state_dict.get(f"{prefix}weight")) is not None and guard.numel() == 0:
            del state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, *args)


class TensorTrainModule(CompressedLayer):
    """Base of the layers whose weight is a product of cores ``core_0``, ``core_1``, ...

    Cores are direct parameters, so checkpoint keys are flat and stable. Nothing keeps a reference to a core: loading
    and rank pruning replace them, and the shapes of the cores are the only record of the ranks. While ranks are
    trained there are rank gates ``rank_gate_0``, ... on the inner bonds too; folding them leaves a layer without.

    A layer whose ranks are all zero is removed: its cores are empty, and its weight is zero.
    """

    num_cores: int

    def _register_cores(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        self.num_cores = len(shapes)
        for index, shape in enumerate(shapes):
            core = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(f"core_{index}", nn.Parameter(core, requires_grad=core.numel() > 0))

    def cores(self) -> list[Tensor]:
        """The cores, first to last."""
        return [getattr(self, f"core_{index}") for index in range(self.num_cores)]

    def rank_gates(self) -> list[Tensor]:
        """The gates of the inner bonds, first to last; none unless ranks are being trained."""
        if getattr(self, "rank_gate_0", None) is None:  # all bonds have one, or none
            return []
        return [getattr(self, f"rank_gate_{index}") for index in range(self.num_cores - 1)]

    def gated_cores(self) -> list[Tensor]:
        """The cores with the gates multiplied in, differentiable: what the layer computes with."""
        return scale_cores(self.cores(), self.rank_gates())

    def add_rank_gates(self) -> None:
        """Put a gate of ones on every inner bond, in float32 (float64 beside such cores); nothing computed changes."""
        for index, core in enumerate(self.cores()[:-1]):
            dtype = torch.promote_types(core.dtype, torch.float32)
            gate = torch.ones(core.shape[-1], dtype=dtype, device=core.device)
            trainable = core.requires_grad and core.numel() > 0
            setattr(self, f"rank_gate_{index}", nn.Parameter(gate, requires_grad=trainable))

    @torch.no_grad()
    def fold_rank_gates(self) -> None:
        """Multiply the gates into the cores and drop them; what the layer computes changes by rounding only."""
        for core, folded in zip(self.cores(), self.gated_cores(), strict=True):
            core.copy_(folded)
        for index in range(len(self.rank_gates())):
            delattr(self, f"rank_gate_{index}")

    @property
    def is_removed(self) -> bool:
        """Whether no rank is left, so that the layer is its bias, or zero."""
        return self.core_0.numel() == 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the inner bonds, read from the cores."""
        return tuple(core.shape[-1] for core in self.cores()[:-1])

    def expected_factors(self) -> list[int]:
        """Middle axes of all cores in order, as the factors demand."""
        raise NotImplementedError

    def _check_ranks_left(self) -> None:
        """Refuse to decompose into no ranks."""
        if self.is_removed:
            raise ValueError(
                f"This {type(self).__name__} was removed: its ranks are {self.ranks}, into which no weight can be "
                "decomposed. Load cores of other ranks with load_cores, or make a new layer."
            )

    def load_cores(self, cores: Sequence[Tensor]) -> None:
        """Take over ``cores`` (of any ranks) as new parameters in this layer's dtype, on the device of ``cores``.

        Raises:
            ValueError: If there are more or fewer cores, or their factors are others.
        """
        own = self.cores()
        if [core.shape[1:-1] for core in cores] != [core.shape[1:-1] for core in own]:
            raise ValueError(
                f"cores of shapes {[tuple(core.shape) for core in cores]} do not fit a layer whose cores have shapes "
                f"{[tuple(core.shape) for core in own]}: number and factors (all but the outer axes) must be equal."
            )
        for index, (new, old) in enumerate(zip(cores, own, strict=True)):
            parameter = nn.Parameter(new.to(old.dtype).contiguous(), requires_grad=old.requires_grad)
            setattr(self, f"core_{index}", parameter)
        if self.rank_gates():
            self.add_rank_gates()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast; gates follow to another device, but never below float32."""
        gates = self.rank_gates()
        exact = [gate.detach() for gate in gates]
        super()._apply(fn, recurse)
        for gate, values in zip(self.rank_gates(), exact, strict=True):
            if torch.promote_types(gate.dtype, torch.float32) != gate.dtype:
                gate.data = values.to(gate.device)
                if gate.grad is not None:
                    gate.grad = gate.grad.to(gate.dtype)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Empty cores get memory of their own: without any, savers take them all for one shared tensor."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self._parameters.items():
            if parameter is not None and parameter.numel() == 0 and not keep_vars:
                destination[prefix + name] = parameter.detach().new_empty(1)[:0].view(parameter.shape)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take on the ranks of the state first: training that has pruned ranks is resumed from it."""
        if f"{prefix}rank_gate_0" in state_dict and not self.rank_gates():
            self.add_rank_gates()
        for name, parameter in self._parameters.items():
            incoming = state_dict.get(prefix + name)
            if name == "bias" or parameter is None or incoming is None or incoming.shape == parameter.shape:
                continue
            if incoming.ndim == parameter.ndim and incoming.shape[1:-1] == parameter.shape[1:-1]:
                trains = parameter.requires_grad or parameter.numel() == 0
                _resize(parameter, incoming.shape)
                parameter.requires_grad_(trains and incoming.numel() > 0)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _resize(parameter: Tensor, shape: torch.Size) -> None:
    """Give ``parameter`` new memory of another shape; the object stays, since optimizers hold it."""
    parameter.grad = None
    # a change of dtype makes torch forget the shape that a graph still alive (the last loss) expects of gradients
    new = parameter.data.new_empty(shape)
    parameter.data = new.float() if new.dtype == torch.float16 else new.half()
    parameter.data = new


def compressed_layers(model: nn.Module) -> dict[str, CompressedLayer]:
    """The compressed layers of ``model`` by their names, without those that are parts of others."""
    found: dict[str, CompressedLayer] = {}
    for name, module in model.named_modules():
        if isinstance(module, CompressedLayer) and name.rpartition(".")[0] not in found:
            found[name] = module
    return found


def removed_output(x: Tensor, features: int, bias: Tensor | None) -> Tensor:
    """What a layer without ranks computes: its bias, or zeros.

    Shape:
        ``(..., in_features) -> (..., features)``, in the dtype of ``x`` (of autocast, where it is on).
    """
    zeros = autocast_input(x).new_zeros(*x.shape[:-1], features)
    return zeros if bias is None else zeros + bias.to(zeros.dtype)
