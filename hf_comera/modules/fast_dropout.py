"""Dropout of a compressed model, which draws fast and remembers in bits where it can, and is torch's elsewhere."""

from torch import Tensor, nn

from hf_comera.modules.unwritten import can_stand_in
from hf_comera.ops.kept_bits import draw_kept, drop, kept_share, serves

__all__ = ["FastDropout", "quicken_dropout", "restore_dropout"]


class FastDropout(nn.Dropout):
    """``nn.Dropout`` that draws other numbers from the same generator, on a CPU several times as fast.

    Rates are rounded to multiples of 1 / 65536. Where it does not serve (other devices, under a compiler or a
    transform, in place) it is ``nn.Dropout``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``input`` with entries set to zero at random while training, and the others scaled up.

        Shape:
            any.
        """
        if not self.training or not self._serves(input):
            return super().forward(input)
        return drop(input, draw_kept(input.shape, self.p), kept_share(self.p))

    def _serves(self, x: Tensor) -> bool:
        return can_stand_in(x) and not self.inplace and x.ndim > 0 and x.is_floating_point() and serves(x, self.p)


def quicken_dropout(model: nn.Module) -> None:
    """Make every ``nn.Dropout`` of ``model`` a fast one, in place."""
    _reclass(model, nn.Dropout, FastDropout)


def restore_dropout(model: nn.Module) -> None:
    """Undo :func:`quicken_dropout`."""
    _reclass(model, FastDropout, nn.Dropout)


def _reclass(model: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new
