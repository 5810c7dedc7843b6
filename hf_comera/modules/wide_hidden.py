"""A stand-in for the hidden layer of a feed-forward block, which the layer behind it takes in without writing it out.

Entry-by-entry functions of it, such as an activation, a gate or dropout, are written down; the second layer then
carries them out a few rows at a time (``ops/wide_code.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from hf_comera.modules.unwritten import Unwritten, can_stand_in
from hf_comera.modules.wide_expression import Call, Leaf, Pointwise, form_of, keep, structure
from hf_comera.ops import kept_bits
from hf_comera.ops.gradients import gradients_of
from hf_comera.ops.tt_linear import from_code
from hf_comera.ops.wide_code import takes_kernel, takes_kernels_like, wide_code
from hf_comera.ops.wide_input import WideForm, WideInput

__all__ = ["WideHidden", "is_wide_enough", "pays"]

_POINTWISE_NAMES = (
    *("add", "sub", "mul", "div", "neg", "square", "pow", "exp", "tanh", "sigmoid", "erf", "relu", "clamp"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__", "__pow__"),
)
_POINTWISE = {
    *(getattr(owner, name) for owner in (torch, Tensor) for name in _POINTWISE_NAMES if hasattr(owner, name)),
    *(functional.gelu, functional.silu, functional.relu, functional.leaky_relu, functional.elu, functional.mish),
    *(functional.hardswish, functional.hardtanh, functional.relu6, functional.softplus),
}
"""From tensors of one shape, and numbers, to a tensor of that shape, entry by entry."""

# Entries of a hidden layer from which on it is not whole in memory.
WORTH_CHUNKS = 1 << 20


def pays(x: Tensor, left: Tensor, out_features: int) -> bool:
    """Whether a hidden layer of ``out_features`` for the rows of ``x`` is worth a stand-in.

    It is where the hidden layer is large; on a GPU, where besides kernels are switched on that take a layer with such
    a ``left`` half.
    """
    wide = is_wide_enough(x.numel() // max(1, x.shape[-1]), out_features)
    return wide and (x.device.type == "cpu" or takes_kernels_like(left)) and can_stand_in(x)


def is_wide_enough(rows: int, out_features: int) -> bool:
    """Whether ``rows`` rows of a hidden layer are too many to be made whole."""
    return rows * out_features >= WORTH_CHUNKS


class _Hidden:
    """An expression with the tensors at its leaves, its shape and dtype."""

    def __init__(
        self, expression: Any, inputs: dict[Leaf, WideInput], masks: dict[Leaf, Tensor], shape: tuple[int, ...]
    ) -> None:
        self.expression, self.inputs, self.masks, self.shape = expression, inputs, masks, shape
        codes = [part.code for part in inputs.values()]
        self.device = codes[0].device
        self.pointwise = Pointwise(expression, [*inputs, *masks], self.device.type)
        with torch.no_grad():
            empty = [code.new_empty(0) for code in codes], [mask.new_empty(0) for mask in masks.values()]
            self.dtype = self.pointwise(*empty).dtype

    def operands(self, left: Tensor) -> tuple[list[WideInput], WideForm | None, list[Tensor]]:
        """Inputs, what a kernel is to compute of them, if there is one, and masks."""
        form = self.form() if takes_kernels_like(left) else None
        return list(self.inputs.values()), form, list(self.masks.values())

    def form(self) -> WideForm | None:
        """The nonlinearity as kernels know it, if they do."""
        return form_of(self.expression, list(self.inputs), list(self.masks), _known_activations())

    def tensors(self) -> list[Tensor | None]:
        """Code, right half and bias of every input."""
        return [tensor for part in self.inputs.values() for tensor in part]


class WideHidden(Unwritten):
    """The hidden layer as an expression of codes.

    Shape:
        ``(..., hidden features)``.
    """

    _hidden: _Hidden

    @staticmethod
    def __new__(cls, hidden: _Hidden) -> WideHidden:
        """Make the stand-in for ``hidden``, without a gradient; :meth:`of` links one to the codes."""
        stand_in: WideHidden = cls._empty(hidden.shape, hidden.dtype, hidden.device)
        stand_in._hidden = hidden
        return stand_in

    @classmethod
    def of(cls, code: Tensor, right: Tensor, bias: Tensor | None) -> WideHidden:
        """The stand-in for ``from_code(code, right, bias)``."""
        bias = None if bias is None else bias.to(code.dtype)
        part = WideInput(code.reshape(-1, code.shape[-1]), right.to(code.dtype), bias)
        if not torch.is_grad_enabled():
            part = WideInput(*(None if tensor is None else tensor.detach() for tensor in part))
        leaf = Leaf()
        return _stand_in(_Hidden(leaf, {leaf: part}, {}, (*code.shape[:-1], right.shape[-1])))

    def stays_unwritten(self, left: Tensor) -> bool:
        """Besides, on a GPU, whether a kernel does all of it."""
        on_cpu = self._hidden.device.type == "cpu"
        return super().stays_unwritten(left) and (on_cpu or takes_kernel(*self._hidden.operands(left), left))

    def code(self, left: Tensor) -> Tensor:
        """``self @ left.T``, a few rows of ``self`` at a time."""
        inputs, form, masks = self._hidden.operands(left)
        code = wide_code(inputs, form or self._hidden.pointwise, masks, left)
        return code.view(*self._hidden.shape[:-1], left.shape[0])

    def _made(self) -> Tensor:
        wides = [from_code(*part) for part in self._hidden.inputs.values()]
        return self._hidden.pointwise(wides, list(self._hidden.masks.values())).view(self._hidden.shape)

    @classmethod
    def _written_down(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _POINTWISE and _can_be_written_down(args, kwargs):
            return _write_down(func, args, kwargs)
        if func is functional.dropout and _can_be_written_down(args, kwargs):
            return _dropout(*args, **kwargs)
        return NotImplemented


class _Link(torch.autograd.Function):
    """Gives the stand-in a gradient path, so that a custom function cannot lose gradients silently."""

    @staticmethod
    def forward(ctx: Any, hidden: _Hidden, *tensors: Tensor | None) -> WideHidden:
        ctx.pointwise, ctx.shape, ctx.num_inputs = hidden.pointwise, hidden.shape, len(hidden.inputs)
        ctx.save_for_backward(*tensors, *hidden.masks.values())
        return WideHidden(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tensors, masks = ctx.saved_tensors[: 3 * ctx.num_inputs], ctx.saved_tensors[3 * ctx.num_inputs :]

        def whole(aliases: list[Any]) -> Tensor:
            wides = [from_code(*aliases[3 * index : 3 * index + 3]) for index in range(ctx.num_inputs)]
            return ctx.pointwise(wides, masks).view(ctx.shape)

        return (None, *gradients_of(whole, tensors, grads[0], create_graph=torch.is_grad_enabled()))


def _stand_in(hidden: _Hidden) -> WideHidden:
    return _Link.apply(hidden, *hidden.tensors())


def _can_be_written_down(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all that is not a number is a stand-in of one shape, and nothing is done in place."""
    others = [*args, *kwargs.values()]
    hidden = [value for value in others if isinstance(value, WideHidden)]
    plain = all(isinstance(value, WideHidden | int | float | str | None) for value in others)
    if not plain or kwargs.get("inplace"):
        return False
    return all(stand_in.can_be_written_down() and stand_in.shape == hidden[0].shape for stand_in in hidden)


def _write_down(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WideHidden:
    sources = [value._hidden for value in (*args, *kwargs.values()) if isinstance(value, WideHidden)]
    inputs = {leaf: part for source in sources for leaf, part in source.inputs.items()}
    masks = {leaf: mask for source in sources for leaf, mask in source.masks.items()}
    written = Call(func, tree_map(_expression, args), tree_map(_expression, kwargs))
    return _stand_in(_Hidden(written, inputs, masks, sources[0].shape))


def _dropout(x: WideHidden, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not 0 <= p < 1:
        return functional.dropout(x.real(), p, training, inplace)
    if not training or p == 0:
        return x
    source, leaf = x._hidden, Leaf()
    rows = x.numel() // max(1, source.shape[-1])
    if kept_bits.serves(x.device, x.numel(), p):
        bits, share = kept_bits.draw_kept((x.numel(),), p), kept_bits.kept_share(p)
        keeps = kept_bits.kept_factors(bits, x.numel(), True, torch.bool).view(rows, source.shape[-1])
    else:
        keeps, share = torch.empty(rows, source.shape[-1], dtype=torch.bool, device=x.device).bernoulli_(1 - p), 1 - p
    written = Call(keep, (source.expression, leaf, 1 / share), {})
    return _stand_in(_Hidden(written, source.inputs, source.masks | {leaf: keeps}, source.shape))


@functools.cache
def _known_activations() -> dict[Any, str]:
    """Names of the activations that kernels know, by what their functions write down."""
    functions = {
        "gelu": [functional.gelu, functools.partial(functional.gelu, approximate="none")],
        "gelu_tanh": [functools.partial(functional.gelu, approximate="tanh"), _gelu_of_gpt2],
        "relu": [functional.relu, torch.relu, Tensor.relu],
        "silu": [functional.silu],
    }
    empty = torch.empty(0, 1)
    with torch.no_grad():
        hidden = WideHidden.of(empty, empty.new_empty(1, 1), None)
        return {
            structure(function(hidden)._hidden.expression): name for name in functions for function in functions[name]
        }


def _gelu_of_gpt2(x: Tensor) -> Tensor:
    """As Transformers writes ``gelu_new``."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _expression(value: Any) -> Any:
    return value._hidden.expression if isinstance(value, WideHidden) else value
