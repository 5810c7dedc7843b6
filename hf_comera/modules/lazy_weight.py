"""A stand-in for ``layer.weight``: shape and dtype for free, the dense matrix only when somebody computes with it.

Model code reads ``layer.weight.dtype`` in forward (T5) and hands ``layer.weight`` to initialisers while it loads; both
would build the matrix that tensor-train form exists to avoid. Real uses (``F.linear(x, layer.weight)``, indexing,
fused losses) get the dense matrix, and gradients flow back to the cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from hf_comera.modules.base import TensorTrainModule

__all__ = ["FREE_QUESTIONS", "LazyWeight", "lazy_weight"]

_FREE_PROPERTIES = ("dtype", "device", "shape", "layout", "ndim", "is_cuda", "is_meta", "is_cpu", "is_quantized")
_FREE_METHODS = ("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "nelement")
FREE_QUESTIONS = {getattr(Tensor, name).__get__ for name in _FREE_PROPERTIES} | {
    getattr(Tensor, name) for name in _FREE_METHODS
}


def lazy_weight(module: TensorTrainModule) -> Tensor:
    """The lazy dense weight of ``module``, linked to its cores for autograd."""
    return _LinkToCores.apply(module, *module.train_parameters())


class LazyWeight(Tensor):
    """Tensor without storage that turns into the dense weight at the first operation on it."""

    # Transformers' initialisers leave flagged tensors alone; filling a dense copy would be lost work.
    _is_hf_initialized = True
    _module: TensorTrainModule

    @staticmethod
    def __new__(cls, module: TensorTrainModule) -> LazyWeight:
        """Make the stand-in for ``module.dense()``."""
        core = module.core_0
        weight = Tensor._make_wrapper_subclass(cls, module.weight_shape(), dtype=core.dtype, device=core.device)
        weight._module = module
        return weight

    def __repr__(self, **kwargs: Any) -> str:
        return f"LazyWeight(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about the tensor; hand anything else the dense matrix."""
        kwargs = kwargs or {}
        if func in FREE_QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == Tensor.requires_grad.__get__:  # a new wrapper at each access: never identical
            return any(parameter.requires_grad for parameter in args[0]._module.train_parameters())
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached from below autograd (custom functions): compute with the dense matrix."""
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs or {}))


class _LinkToCores(torch.autograd.Function):
    """Gives the lazy weight a gradient path, so that no caller can lose gradients silently."""

    @staticmethod
    def forward(ctx: Any, module: TensorTrainModule, *cores: Tensor) -> LazyWeight:
        ctx.module = module
        return LazyWeight(module)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cores = ctx.module.train_parameters()
        with torch.enable_grad():
            return (None, *torch.autograd.grad(ctx.module.dense(), cores, grads[0]))


def _dense(value: Any) -> Any:
    return value._module.dense() if isinstance(value, LazyWeight) else value
