"""What every layer in tensor-train form has: cores as flat parameters, ranks, a lazy dense weight."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_comera.modules.lazy_weight import lazy_weight

__all__ = ["TensorTrainModule"]


class TensorTrainModule(nn.Module):
    """Base of the layers whose weight is a product of cores ``core_0``, ``core_1``, ...

    Cores are direct parameters, so checkpoint keys are flat and stable. Nothing keeps a reference to a core: loading
    and rank pruning replace them, and the shapes of the cores are the only record of the ranks.
    """

    num_cores: int
    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]
    rank_activation: str | None = None
    """Nonlinearity between the halves of the train; with one, no dense weight computes what the layer does."""

    def _register_cores(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        self.num_cores = len(shapes)
        for index, shape in enumerate(shapes):
            self.register_parameter(f"core_{index}", nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def cores(self) -> list[Tensor]:
        """The cores, first to last."""
        return [getattr(self, f"core_{index}") for index in range(self.num_cores)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the inner bonds, read from the cores."""
        return tuple(core.shape[-1] for core in self.cores()[:-1])

    @property
    def num_core_parameters(self) -> int:
        """Entries of all cores."""
        return sum(core.numel() for core in self.cores())

    @property
    def num_dense_parameters(self) -> int:
        """Entries of the dense weight that the cores stand for."""
        return math.prod(self.weight_shape())

    @property
    def weight(self) -> Tensor:
        """The dense weight, lazily: nothing is built until somebody computes with it.

        With a rank activation there is none: questions about it are answered, computing with it raises, and in
        compiled code gives NaN.
        """
        if torch.compiler.is_compiling():  # the stand-in cannot be traced; an unused dense matrix is dead code there
            if self.rank_activation is not None:
                return self.cores()[0].new_full((), torch.nan).expand(self.weight_shape())
            return self.dense()
        return lazy_weight(self)

    def weight_shape(self) -> tuple[int, int]:
        """Shape of the dense weight that this layer replaces."""
        raise NotImplementedError

    def expected_factors(self) -> list[int]:
        """Middle axes of all cores in order, as the factors demand."""
        raise NotImplementedError

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw new cores; the entries of the implied matrix have deviation ``std`` (default: that of torch.nn)."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The dense weight, differentiable, in the layout of the layer that this one replaces."""
        raise NotImplementedError

    def load_dense(self, weight: Tensor) -> None:
        """Replace the cores by the TT-SVD of ``weight`` (of shape :meth:`weight_shape`), at this layer's ranks."""
        raise NotImplementedError

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
