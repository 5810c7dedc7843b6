"""A proxy for ``layer.weight``: shape and dtype for free, the dense matrix only when somebody computes with it.

Model code reads ``layer.weight.dtype`` in forward (T5) and hands ``layer.weight`` to initialisers while it loads; both
would build the matrix that tensor-train form exists to avoid. Real uses (``F.linear(x, layer.weight)``, indexing,
fused losses) get the dense matrix, and gradients flow back to the cores.

An edit of the weight would change that matrix and no core. Initialisers that ask for a deviation draw new cores, and a
factor goes into a core (RWKV divides weights); every other edit is refused with the way to do it, also of views of the
matrix (``layer.weight[0].zero_()``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from hf_comera.modules.base import CompressedLayer

__all__ = ["FREE_QUESTIONS", "LazyWeight", "edits_left_out", "lazy_weight"]

_LEAVE_EDITS_OUT = ContextVar("leave edits of lazy weights out", default=False)

_FREE_PROPERTIES = ("dtype", "device", "shape", "layout", "ndim", "is_cuda", "is_meta", "is_cpu", "is_quantized")
_FREE_METHODS = ("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "nelement")
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
                                           "and", "or", "xor", "lshift", "rshift")}  # fmt: skip
FREE_QUESTIONS = {getattr(Tensor, name).__get__ for name in _FREE_PROPERTIES} | {
    getattr(Tensor, name) for name in _FREE_METHODS
}
_OF_REQUIRES_GRAD = (Tensor.requires_grad_, Tensor.requires_grad.__set__)


def lazy_weight(module: CompressedLayer) -> Tensor:
    """The lazy dense weight of ``module``, linked to its cores for autograd."""
    return _LinkToCores.apply(module, *module.train_parameters())


class LazyWeight(Tensor):
    """Tensor without storage that turns into the dense weight at the first operation on it."""

    # Transformers' initialisers leave flagged tensors alone; filling a dense copy would be lost work.
    _is_hf_initialized = True
    _module: CompressedLayer
    _detached: bool

    @staticmethod
    def __new__(cls, module: CompressedLayer, detached: bool = False) -> LazyWeight:
        """Make the proxy of ``module.dense()``, or for what ``.data`` of it would be."""
        core = module.cores()[0]
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
            return args[0]._module.cores()[0].data_ptr()
        if func == Tensor.data.__get__:
            return cls(args[0]._module, detached=True)
        if func in _DEVIATIONS:
            return _draw(func, *args, **kwargs)
        if (edited := _edited(func, args, kwargs)) is not None:
            return edited if _scale(func, *args, **kwargs) else _refuse_edit(func, edited)
        return _computed(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached from below autograd (custom functions): compute with the dense matrix."""
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs or {}))


class DenseView(Tensor):
    """The dense matrix of a layer, or a view of it: an ordinary tensor to compute with, which cannot be edited."""

    _module: CompressedLayer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as usual; views of it are guarded too, and edits refused."""
        kwargs = kwargs or {}
        if func in (Tensor.__deepcopy__, Tensor.__reduce_ex__) and not getattr(args[0], "_is_param", False):
            return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)  # a copy is a matrix of its own
        edited = None if func in _OF_REQUIRES_GRAD else _edited(func, args, kwargs)
        return _computed(func, args, kwargs) if edited is None else _refuse_edit(func, edited)


class _LinkToCores(torch.autograd.Function):
    """Gives the lazy weight a gradient path, so that no caller can lose gradients silently."""

    @staticmethod
    def forward(ctx: Any, module: CompressedLayer, *cores: Tensor) -> LazyWeight:
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
    dense = value._module.dense().contiguous()  # as the weight of a dense layer is: reshaped, it gives a view
    return dense.detach() if value._detached else dense


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` gives for dense matrices; what shares memory with one of them is guarded."""
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, LazyWeight | DenseView)]
    dense = {id(value): _dense(value) for value in given}
    args, kwargs = tree_map(lambda value: dense.get(id(value), value), (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state():
        return result
    owners = [(dense[id(value)], value._module) for value in given if not getattr(value, "_is_param", False)]
    return tree_map(lambda value: _guarded(value, owners), result)


def _guarded(value: Any, owners: list[tuple[Tensor, CompressedLayer]]) -> Any:
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif type(value) is Tensor:
        for dense, module in owners:
            if torch._C._is_alias_of(value, dense):
                value = value.as_subclass(DenseView)  # type: ignore[arg-type]
                value._module = module
                return value
    return value


def _edited(func: Any, args: Any, kwargs: Any) -> LazyWeight | DenseView | None:
    """The weight that a call would change, if any: ``w.fill_(0)``, ``w[0] = 1``, ``w += 1``, ``out=w``, lists of w."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name != "share_memory_"
    changed = [kwargs.get("out")]
    if in_place or name in ("__set__", "__setitem__") or name in _AUGMENTED:
        changed += [args[0] if args else None, kwargs.get("tensor"), kwargs.get("input")]
    for value in tree_leaves(changed):
        # a parameter made of a view is a matrix of its own, which optimizers may change
        if isinstance(value, LazyWeight | DenseView) and not getattr(value, "_is_param", False):
            return value
    return None


@contextlib.contextmanager
def edits_left_out() -> Iterator[None]:
    """Within, edits of lazy weights do nothing: initialisers of Transformers' models, which know dense layers only."""
    token = _LEAVE_EDITS_OUT.set(True)
    try:
        yield
    finally:
        _LEAVE_EDITS_OUT.reset(token)


def _refuse_edit(func: Any, weight: LazyWeight | DenseView) -> LazyWeight | DenseView:
    if _LEAVE_EDITS_OUT.get():
        return weight
    kind = type(weight._module).__name__
    if func in _OF_REQUIRES_GRAD:
        raise RuntimeError(
            f"requires_grad of the weight cannot be set, since {kind} keeps it as cores. To freeze the layer: "
            "for p in layer.parameters(): p.requires_grad_(False). By name, its parameters end in "
            f"{', '.join(name for name, _ in weight._module.named_parameters())}."
        )
    raise RuntimeError(
        f"weight.{func.__name__} would change a dense copy of what {kind} keeps as cores, and nothing else. To draw "
        "new cores: torch.nn.init.normal_(layer.weight, std=0.02). To set a matrix, also one that was edited: "
        "layer.load_dense(weight). The cores themselves are layer.cores()."
    )


def _scale(func: Any, weight: Any = None, factor: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Multiply or divide by a number, where torch would do so to a parameter; False where it is another edit."""
    operation = _SCALINGS.get(getattr(func, "__name__", ""))
    may = isinstance(weight, LazyWeight) and (weight._detached or not torch.is_grad_enabled())
    if operation is None or not may or args or kwargs or _LEAVE_EDITS_OUT.get():
        return False
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor or not math.isfinite(factor):
        return False
    with torch.no_grad():
        operation(weight._module.cores()[-1], factor)
    return True


def _draw(func: Any, tensor: LazyWeight, *args: Any, **kwargs: Any) -> LazyWeight:
    """Draw cores as an initialiser of torch asks: entries of the weight get the deviation that it would give them."""
    if _LEAVE_EDITS_OUT.get():
        return tensor
    mean, std = _DEVIATIONS[func](tensor, *args, **kwargs)
    if mean or not (0 < std < math.inf) or kwargs.get("generator") is not None:
        raise RuntimeError(
            f"torch.nn.init.{func.__name__}: a {type(tensor._module).__name__} draws cores for entries of mean 0 and "
            f"a positive deviation from torch's own generator, but mean {mean} and deviation {std} were asked for"
            f"{'' if kwargs.get('generator') is None else ' of another generator'}. Use "
            "torch.nn.init.normal_(layer.weight, std=0.02), or set a matrix: layer.load_dense(weight)."
        )
    tensor._module.draw(std)
    return tensor


def _of_normal(weight: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> tuple[float, float]:
    return mean, std


def _of_uniform(weight: Tensor, a: float = 0.0, b: float = 1.0, generator: Any = None) -> tuple[float, float]:
    return (a + b) / 2, (b - a) / math.sqrt(12)


def _of_kaiming(
    weight: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> tuple[float, float]:
    fan = weight.shape[1] if mode == "fan_in" else weight.shape[0]
    return 0.0, nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)


_SCALINGS = {"mul_": Tensor.mul_, "div_": Tensor.div_, "__imul__": Tensor.mul_, "__itruediv__": Tensor.div_}

_DEVIATIONS: dict[Any, Callable[..., tuple[float, float]]] = {
    nn.init.normal_: _of_normal,
    nn.init.uniform_: _of_uniform,
    nn.init.kaiming_uniform_: _of_kaiming,
}
"""Initialisers of torch that reach a proxy as themselves, and the mean and deviation that each asks for."""
