"""The base of stand-ins for outputs that the layer behind takes in without their being written out.

A layer returns its code in the guise of its output. What a kind of stand-in knows is written down; whatever else is
done with it is done with the real tensor, made on the spot, so no model has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from hf_comera.modules.lazy_weight import FREE_QUESTIONS

__all__ = ["Unwritten", "can_stand_in"]

_FREE = FREE_QUESTIONS | {Tensor.requires_grad.__get__}


def can_stand_in(x: Tensor) -> bool:
    """Whether the output for ``x`` may be a stand-in: tensors that a transform or a tracer follows stay tensors."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or forward_ad._current_level >= 0:
        return False
    return type(x) in (Tensor, torch.nn.Parameter, FakeTensor) and not torch._C._are_functorch_transforms_active()


class Unwritten(Tensor):
    """Tensor without storage that knows how its entries are computed from codes.

    A hook registered on it has an effect only before something is computed with it.
    """

    _real: Tensor | None
    _region: Any
    """What autograd hands saved tensors to where the stand-in was made: tells regions of checkpointing apart."""

    @classmethod
    def _empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        stand_in = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        stand_in._real, stand_in._region = None, _region()
        return stand_in

    def __repr__(self, **kwargs: Any) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def stays_unwritten(self, left: Tensor) -> bool:
        """Whether a layer with this ``left`` half gains from :meth:`code`; not if the real tensor is there already."""
        return self._real is None and self._is_linked()

    def can_be_written_down(self) -> bool:
        """Whether functions of it may be: it is not real yet, nor would they get back a gradient it has lost."""
        return self._real is None and self._is_linked() and (torch.is_grad_enabled() or not self.requires_grad)

    def _is_linked(self) -> bool:
        """Whether the gradient of the stand-in, if there is one, goes to the codes.

        It goes elsewhere if a custom function returned the stand-in, as reentrant checkpointing does.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is None or self.grad_fn.name() == "_LinkBackward"

    def code(self, left: Tensor) -> Tensor:
        """``self @ left.T``, without writing ``self`` out.

        Shape:
            ``left`` ``(R, features)`` -> ``(..., R)``, in the dtype of ``left``.
        """
        raise NotImplementedError

    def real(self) -> Tensor:
        """The tensor itself, made once, with a gradient if the stand-in has one."""
        if self._real is None:
            # a region that is checkpointed must find the same number of saved tensors when it is run once more
            outside = saved_tensors_hooks(_same, _same) if self._region != _region() else nullcontext()
            with torch.set_grad_enabled(self.requires_grad), outside:
                self._real = self._made() if self._is_linked() else _Relinked.apply(self, self._made().detach())
        return self._real

    def _made(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def _written_down(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func`` gives, as a stand-in or from one; NotImplemented if only the real tensor can tell."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions, write down what can be, hand anything else the real tensor."""
        kwargs = kwargs or {}
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        written = cls._written_down(func, args, kwargs)
        if written is not NotImplemented:
            return written
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached from below autograd (scripted functions): compute with the real tensor, without its gradient."""
        return func(*tree_map(_real_below, args), **tree_map(_real_below, kwargs or {}))


class _Relinked(torch.autograd.Function):
    """Hands the gradient of the real tensor to the stand-in, whose own it is."""

    @staticmethod
    def forward(ctx: Any, stand_in: Unwritten, real: Tensor) -> Tensor:
        return real.view_as(real)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None


def _real(value: Any) -> Any:
    return value.real() if isinstance(value, Unwritten) else value


def _real_below(value: Any) -> Any:
    if not isinstance(value, Unwritten):
        return value
    return value._made() if value._real is None else value._real


def _region() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _same(tensor: Tensor) -> Tensor:
    return tensor
