"""Base classes of compressed layers: a lazy dense weight; in tensor-train form also cores, gates and ranks.

``LazyWeight`` stands for ``layer.weight``: shape and dtype for free, the dense matrix only when it is computed with.
Model code reads ``layer.weight.dtype`` in forward (T5) and hands ``layer.weight`` to initialisers while it loads; both
would build the matrix that tensor-train form exists to avoid. Real uses (``F.linear(x, layer.weight)``, indexing,
fused losses) get the dense matrix, and gradients flow back to the cores.

An edit of the weight would change that matrix and no core. Initialisers that ask for a deviation draw new cores, and a
factor goes into a core (RWKV divides weights). Every other edit is refused with the way to do it, also of views of the
matrix (``layer.weight[0].zero_()``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_comera.ops.precision import autocast_input
from hf_comera.tt.cores import scale_cores

__all__ = [
    "FREE_QUESTIONS",
    "CompressedLayer",
    "LazyWeight",
    "TensorTrainModule",
    "compressed_layers",
    "edits_left_out",
    "lazy_weight",
    "removed_output",
]


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

    def tt_parameters(self) -> list[Tensor]:
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
        """The dense weight, lazily: nothing is built until code computes with it."""
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
    core_0: nn.Parameter

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
        """The cores with the gates multiplied in, differentiable: the ones that the layer computes with."""
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
        """Multiply the gates into the cores and drop them; outputs of the layer change by rounding only."""
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
    """The output of a layer without ranks: its bias, or zeros.

    Shape:
        ``(..., in_features) -> (..., features)``, in the dtype of ``x`` (of autocast, where it is on).
    """
    zeros = autocast_input(x).new_zeros(*x.shape[:-1], features)
    return zeros if bias is None else zeros + bias.to(zeros.dtype)


_LEAVE_EDITS_OUT = ContextVar("leave edits of lazy weights out", default=False)

_FREE_PROPERTIES = ("dtype", "device", "shape", "layout", "ndim", "is_cuda", "is_meta", "is_cpu", "is_quantized")
_FREE_METHODS = ("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "nelement")
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
                                           "and", "or", "xor", "lshift", "rshift")}  # fmt: skip
FREE_QUESTIONS = {getattr(Tensor, name).__get__ for name in _FREE_PROPERTIES} | {
    getattr(Tensor, name) for name in _FREE_METHODS
}
_OF_REQUIRES_GRAD = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def lazy_weight(module: CompressedLayer) -> Tensor:
    """The lazy dense weight of ``module``, linked to its cores for autograd."""
    return _LinkToCores.apply(module, *module.tt_parameters())


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

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"LazyWeight(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about the tensor; hand anything else the dense matrix."""
        kwargs = kwargs or {}
        if func in FREE_QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # equal, not identical: a new wrapper at each access
        if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return any(parameter.requires_grad for parameter in args[0]._module.tt_parameters())
        if func == Tensor.data_ptr:  # PEFT tells by it which weights are tied
            return args[0]._module.cores()[0].data_ptr()
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return cls(args[0]._module, detached=True)
        if func in _DEVIATIONS:
            return _draw(func, *args, **kwargs)
        if (edited := _edited(func, args, kwargs)) is not None:
            return edited if _scale(func, *args, **kwargs) else _refuse_edit(func, edited)
        return _computed(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
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
        cores = ctx.module.tt_parameters()
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
    """The result of ``func`` for dense matrices; a result that shares memory with one of them is guarded."""
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
            if torch._C._is_alias_of(value, dense):  # type: ignore[attr-defined]
                value = value.as_subclass(DenseView)
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


_SCALINGS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("mul_", "__imul__"), Tensor.mul_),
    **dict.fromkeys(("div_", "__itruediv__"), Tensor.div_),
}

_DEVIATIONS: dict[Any, Callable[..., tuple[float, float]]] = {
    nn.init.normal_: _of_normal,
    nn.init.uniform_: _of_uniform,
    nn.init.kaiming_uniform_: _of_kaiming,
}
"""Initialisers of torch that reach a proxy as themselves, and the mean and deviation that each asks for."""
