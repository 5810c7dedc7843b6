"""Dropout of a compressed model, which draws fast and remembers in bits where it can, and is torch's elsewhere."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from hf_comera.ops import bit_dropout

__all__ = ["FastDropout", "disable_fast_dropout", "enable_fast_dropout"]


class FastDropout(nn.Dropout):
    """``nn.Dropout`` that draws other numbers from the same generator, on a CPU up to several times as fast.

    Rates are rounded to multiples of 1 / 65536. For small tensors and where it does not serve (other devices, under an
    exporter or a transform, in place) it is ``nn.Dropout``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``input`` with entries set to zero at random while training, and the others scaled up.

        Shape:
            any.
        """
        if not self.training or not self._serves(input):
            return super().forward(input)
        bits = bit_dropout.draw_kept((input.numel(),), self.p)
        return bit_dropout.drop(input, bits, bit_dropout.kept_share(self.p))

    def _serves(self, x: Tensor) -> bool:
        plain = x.layout is torch.strided and not x.is_nested and x.is_floating_point() and not _is_followed(x)
        return plain and not self.inplace and bit_dropout.serves(x.device, x.numel(), self.p)


def _is_followed(x: Tensor) -> bool:
    """Whether an exporter, a transform or a tensor subclass follows what is done with ``x``."""
    if torch.compiler.is_compiling():  # which sees plain tensors as such, and calls the operators as they are
        return torch.compiler.is_exporting()
    if torch._C._get_tracing_state() or forward_ad._current_level >= 0:
        return True
    return type(x) not in (Tensor, nn.Parameter, FakeTensor) or torch._C._are_functorch_transforms_active()


def enable_fast_dropout(model: nn.Module) -> None:
    """Make every ``nn.Dropout`` of ``model`` a fast one, in place."""
    _reclass(model, nn.Dropout, FastDropout)


def disable_fast_dropout(model: nn.Module) -> None:
    """Undo :func:`enable_fast_dropout`."""
    _reclass(model, FastDropout, nn.Dropout)


def _reclass(model: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new
