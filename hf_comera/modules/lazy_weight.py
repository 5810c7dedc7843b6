"""A stand-in for ``layer.weight``: shape and dtype for free, the dense matrix only when somebody computes with it.

Model code reads ``layer.weight.dtype`` in forward (T5) and hands ``layer.weight`` to initialisers while it loads; both
would build the matrix that tensor-train form exists to avoid. Real uses (``F.linear(x, layer.weight)``, indexing,
fused losses) get the dense matrix, and gradients flow back to the cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from hf_comera.modules.base import TensorTrainModule

__all__ = ["FREE_QUESTIONS", "LazyWeight", "edits_left_out", "lazy_weight"]

_LEAVE_EDITS_OUT = ContextVar("leave edits of lazy weights out", default=False)

_FREE_PROPERTIES = ("dtype", "device", "shape", "layout", "ndim", "is_cuda", "is_meta", "is_cpu", "is_quantized")
_FREE_METHODS = ("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "nelement")
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
                                           "and", "or", "xor", "lshift", "rshift")}  # fmt: skip
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
    _detached: bool

    @staticmethod
    def __new__(cls, module: TensorTrainModule, detached: bool = False) -> LazyWeight:
        """Make the stand-in for ``module.dense()``, or for what ``.data`` of it would be."""
        core = module.core_0
        weight = Tensor._make_wrapper_subclass(cls, module.weight_shape(), dtype=core.dtype, device=core.device)
        weight._module, weight._detached = module, detached
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
        if func == Tensor.data_ptr:  # PEFT tells by it which weights are tied
            return args[0]._module.core_0.data_ptr()
        if func == Tensor.data.__get__:
            return cls(args[0]._module, detached=True)
        if _is_edit(func) and args and isinstance(args[0], LazyWeight):
            return _refuse_edit(func, args[0])
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
        trained = [core for core in cores if core.requires_grad]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.module.dense(), trained, grads[0]))
        return (None, *(next(found) if core.requires_grad else None for core in cores))


def _dense(value: Any) -> Any:
    if not isinstance(value, LazyWeight):
        return value
    return value._module.dense().detach() if value._detached else value._module.dense()


def _is_edit(func: Any) -> bool:
    """Whether a call changes its first argument: ``w.fill_(0)``, ``w[0] = 1``, ``w += 1``, ``w.data = ...``."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name != "share_memory_"
    return in_place or name in ("__set__", "__setitem__") or name in _AUGMENTED


@contextlib.contextmanager
def edits_left_out() -> Iterator[None]:
    """Within, edits of lazy weights do nothing: initialisers of Transformers' models, which know dense layers only."""
    token = _LEAVE_EDITS_OUT.set(True)
    try:
        yield
    finally:
        _LEAVE_EDITS_OUT.reset(token)


def _refuse_edit(func: Any, weight: LazyWeight) -> LazyWeight:
    if _LEAVE_EDITS_OUT.get():
        return weight
    raise RuntimeError(
        f"weight.{func.__name__} would change a dense copy of what {type(weight._module).__name__} keeps as cores, "
        "and nothing else. Change the cores (layer.cores()), or give the layer a new weight: layer.load_dense(weight)."
    )
