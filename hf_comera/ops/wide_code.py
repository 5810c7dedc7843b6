"""From codes to a code, past a hidden layer that is wider than both and is never whole in memory.

In a feed-forward block, ``hidden = act(code_1 @ right_1 + bias_1)`` is many times wider than the codes before and
behind it. It is made, used and dropped a few rows at a time, in the processor's cache, and made once more in backward.
Saved are codes.

Source: recomputing what is cheap: Korthikanti et al., arXiv:2205.05198. That codes are enough to do it is ours.
"""

# Shapes here: T = rows, H = hidden features, R = rank of the code behind.

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear

from hf_comera.ops.cuda import tiled_mlp as kernels
from hf_comera.ops.cuda.dispatch import kernels_serve, register_cuda_kernel
from hf_comera.ops.cuda.tiled_mlp import wide_code_refusal, wide_operand_refusal
from hf_comera.ops.gradients import gradients_of
from hf_comera.ops.precision import without_autocast
from hf_comera.ops.wide_input import WideForm, WideInput

__all__ = ["takes_kernel", "takes_kernels_like", "wide_code"]

# Entries of the hidden layer at a time: few enough for the cache that cores share, enough for full-speed products.
CHUNK_ENTRIES = 1 << 20

Pointwise = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def takes_kernels_like(half: Tensor) -> bool:
    """Whether kernels are switched on and take layers with such a half."""
    return kernels_serve(half.device) and wide_operand_refusal(half) is None


def takes_kernel(inputs: Sequence[WideInput], form: WideForm | None, masks: Sequence[Tensor], left: Tensor) -> bool:
    """Whether a kernel computes :func:`wide_code` of a form; None is a nonlinearity of another form."""
    codes, rights, _ = _columns(inputs)
    taken = form is not None and wide_code_refusal(codes, rights, masks, left, form.scale) is None
    return taken and takes_kernels_like(left)


def wide_code(inputs: Sequence[WideInput], pointwise: Pointwise, masks: Sequence[Tensor], left: Tensor) -> Tensor:
    """``pointwise(code_1 @ right_1 + bias_1, ...) @ left.T``.

    Args:
        inputs: The linear maps into the hidden layer: one, or two where one gates the other.
        pointwise: From rows of all inputs and of all masks to rows of the hidden layer, entry by entry. A
            :class:`WideForm` goes to operators that have CUDA kernels.
        masks: ``(T, H)``, passed to ``pointwise`` beside the inputs; for dropout.
        left: ``(R, H)``, left half of the layer behind.

    Shape:
        ``(T, R)``, in the dtype of ``left``.
    """
    if isinstance(pointwise, WideForm):
        inputs, pointwise = pointwise.in_order(inputs)
    tensors = [tensor for part in inputs for tensor in part]
    return _WideCode.apply(pointwise, len(inputs), left, *tensors, *masks)


class _WideCode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pointwise: Pointwise, num_inputs: int, left: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.pointwise, ctx.num_inputs = pointwise, num_inputs
        ctx.save_for_backward(left, *tensors)
        inputs, masks = _group(num_inputs, tensors)
        with without_autocast(left):
            if isinstance(pointwise, WideForm):
                code: Tensor = _wide_code(*_columns(inputs), masks, left, **pointwise.settings())
                return code
            return _in_chunks(inputs, pointwise, masks, left)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        left, *tensors = ctx.saved_tensors
        inputs, masks = _group(ctx.num_inputs, tensors)
        with without_autocast(left):
            if torch.is_grad_enabled():
                found = _differentiable_gradients(ctx, grads[0], [left, *tensors[: 3 * ctx.num_inputs]], masks)
            elif isinstance(ctx.pointwise, WideForm):
                operands = (*_columns(inputs), masks, left)
                found = _by_tensor(_wide_code_backward(grads[0], *operands, **ctx.pointwise.settings()), inputs, left)
            else:
                found = _by_tensor(_Backward(ctx.pointwise, left, inputs, masks).run(grads[0]), inputs, left)
        return (None, None, *found, *(None for _ in masks))


@torch.library.custom_op("hf_comera::wide_code", mutates_args=())
def _wide_code(
    codes: list[Tensor],
    rights: list[Tensor],
    biases: list[Tensor | None],
    masks: list[Tensor],
    left: Tensor,
    *,
    activation: str,
    scale: float | None,
) -> Tensor:
    """:func:`wide_code` of a form: the first input activated, times the second one, if there is one."""
    inputs = list(map(WideInput, codes, rights, biases))
    return _in_chunks(inputs, WideForm(activation, tuple(range(len(codes))), scale), masks, left)


@_wide_code.register_fake
def _(codes: list[Tensor], rights: Any, biases: Any, masks: Any, left: Tensor, **form: Any) -> Tensor:
    return left.new_empty(codes[0].shape[0], left.shape[0])


register_cuda_kernel(_wide_code, kernels.wide_code)


@torch.library.custom_op("hf_comera::wide_code_backward", mutates_args=())
def _wide_code_backward(
    grad: Tensor,
    codes: list[Tensor],
    rights: list[Tensor],
    biases: list[Tensor | None],
    masks: list[Tensor],
    left: Tensor,
    *,
    activation: str,
    scale: float | None,
) -> list[Tensor]:
    """Its gradients, as :meth:`_Backward.run` returns them."""
    inputs = list(map(WideInput, codes, rights, biases))
    return _Backward(WideForm(activation, tuple(range(len(codes))), scale), left, inputs, masks).run(grad)


@_wide_code_backward.register_fake
def _(
    grad: Any, codes: list[Tensor], rights: list[Tensor], biases: Any, masks: Any, left: Tensor, **form: Any
) -> list[Tensor]:
    exact = torch.promote_types(left.dtype, torch.float32)
    num_rows = sum(right.shape[0] for right in rights) + left.shape[0] + len(rights)
    return [left.new_empty(num_rows, left.shape[1], dtype=exact), *map(torch.empty_like, codes)]


register_cuda_kernel(_wide_code_backward, kernels.wide_code_backward)


def _in_chunks(inputs: Sequence[WideInput], pointwise: Pointwise, masks: Sequence[Tensor], left: Tensor) -> Tensor:
    code_TR = left.new_empty(inputs[0].code.shape[0], left.shape[0])
    for chunk in _chunks(code_TR, left.shape[1]):
        hidden = pointwise([part.rows(chunk) for part in inputs], [mask[chunk] for mask in masks])
        torch.mm(hidden.to(left.dtype), left.T, out=code_TR[chunk])
    return code_TR


class _Backward:
    """The gradients, gathered chunk after chunk."""

    def __init__(
        self, pointwise: Pointwise, left: Tensor, inputs: Sequence[WideInput], masks: Sequence[Tensor]
    ) -> None:
        self.pointwise, self.left, self.inputs, self.masks = pointwise, left, inputs, masks
        exact = torch.promote_types(left.dtype, torch.float32)  # sums over chunks are not rounded to 16 bits
        num_rows = sum(part.right.shape[0] for part in inputs) + left.shape[0] + len(inputs)
        self.wide = left.new_zeros(num_rows, left.shape[1], dtype=exact)
        self.drights, self.dleft, self.dbiases = _wide_rows(self.wide, inputs, left)
        self.dcodes = [torch.empty_like(part.code) for part in inputs]

    def run(self, dcode_TR: Tensor) -> list[Tensor]:
        """Gradients of all that is as wide as the hidden layer, for :func:`_wide_rows`, then of the codes."""
        for chunk in _chunks(dcode_TR, self.left.shape[1]):
            self._add_chunk(chunk, dcode_TR[chunk])
        return [self.wide, *self.dcodes]

    def _add_chunk(self, chunk: slice, dcode: Tensor) -> None:
        hidden, dwides = self._differentiated(
            [part.rows(chunk) for part in self.inputs], [mask[chunk] for mask in self.masks], dcode @ self.left
        )
        _add_product(self.dleft, dcode.T, hidden)
        for index, (part, dwide) in enumerate(zip(self.inputs, dwides, strict=True)):
            torch.mm(dwide, part.right.T, out=self.dcodes[index][chunk])
            _add_product(self.drights[index], part.code[chunk].T, dwide)
            if part.bias is not None:
                self.dbiases[index].add_(dwide.sum(0, dtype=self.wide.dtype))

    def _differentiated(
        self, wides: list[Tensor], masks: list[Tensor], dhidden: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The hidden layer in the dtype of ``left``, and the gradients of its inputs."""
        if isinstance(self.pointwise, WideForm):
            return self.pointwise(wides, masks).to(self.left.dtype), self.pointwise.gradients(dhidden, wides, masks)
        with torch.enable_grad():
            hidden = self.pointwise([wide.requires_grad_() for wide in wides], masks).to(self.left.dtype)
        return hidden.detach(), torch.autograd.grad(hidden, wides, dhidden)


def _wide_rows(
    wide: Tensor, inputs: Sequence[WideInput], left: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
    """Rows of the gradients of the rights, of ``left`` and of the biases."""
    ranks, count = [part.right.shape[0] for part in inputs], len(inputs)
    rows = wide.split([*ranks, left.shape[0], *[1] * count])
    return rows[:count], rows[count], rows[count + 1 :]


def _by_tensor(grads: list[Tensor], inputs: Sequence[WideInput], left: Tensor) -> list[Tensor | None]:
    """Gradients of ``left``, then of code, right and bias of each input, in their dtypes."""
    wide, *dcodes = grads
    drights, dleft, dbiases = _wide_rows(wide, inputs, left)
    found: list[Tensor | None] = [dleft.to(left.dtype)]
    for part, dcode, dright, dbias in zip(inputs, dcodes, drights, dbiases, strict=True):
        found += [dcode, dright.to(part.right.dtype), None]
        if part.bias is not None:  # copied: as the gradient of a parameter it would hold the memory of all rows
            found[-1] = dbias[0].to(part.bias.dtype, copy=True)
    return found


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    else:
        total += one @ other


def _differentiable_gradients(ctx: Any, grad: Tensor, tensors: list[Any], masks: list[Tensor]) -> list[Tensor | None]:
    """The same with a graph and the hidden layer whole, for second derivatives."""

    def code_of(aliases: list[Any]) -> Tensor:
        inputs, _ = _group(ctx.num_inputs, aliases[1:])
        hidden = ctx.pointwise([part.rows(slice(None)) for part in inputs], masks)
        return linear(hidden.to(aliases[0].dtype), aliases[0])

    return gradients_of(code_of, tensors, grad, create_graph=True)


def _group(num_inputs: int, tensors: Sequence[Any]) -> tuple[list[WideInput], list[Tensor]]:
    parts = [WideInput(*tensors[3 * index : 3 * index + 3]) for index in range(num_inputs)]
    return parts, list(tensors[3 * num_inputs :])


def _columns(inputs: Sequence[WideInput]) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Codes, right halves and biases."""
    return [part.code for part in inputs], [part.right for part in inputs], [part.bias for part in inputs]


def _chunks(code_TR: Tensor, hidden: int) -> Iterator[slice]:
    """Rows that are computed at a time; of a tensor without entries only the first."""
    step = max(1, CHUNK_ENTRIES // hidden)
    stop = min(step, len(code_TR)) if isinstance(code_TR, FakeTensor) else len(code_TR)
    for start in range(0, stop, step):
        yield slice(start, start + step)
