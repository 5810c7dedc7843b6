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

from hf_comera.ops import wide_code_kernels
from hf_comera.ops.gradients import gradients_of
from hf_comera.ops.kernel_switch import kernels_serve
from hf_comera.ops.precision import without_autocast
from hf_comera.ops.wide_code_kernels import wide_code_refusal, wide_operand_refusal
from hf_comera.ops.wide_input import WideForm, WideInput

__all__ = ["takes_kernel", "takes_kernels_like", "wide_code"]

# Entries of the hidden layer at a time: few enough for the cache that cores share, enough for full-speed products.
CHUNK_ENTRIES = 1 << 20

Pointwise = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def takes_kernels_like(half: Tensor) -> bool:
    """Whether kernels are switched on and take layers with such a half."""
    return kernels_serve(half.device) and wide_operand_refusal(half) is None


def takes_kernel(inputs: Sequence[WideInput], form: WideForm | None, masks: Sequence[Tensor], left: Tensor) -> bool:
    """Whether a kernel computes :func:`wide_code`."""
    return takes_kernels_like(left) and wide_code_refusal(inputs, form, masks, left) is None


def wide_code(
    inputs: Sequence[WideInput],
    pointwise: Pointwise,
    masks: Sequence[Tensor],
    left: Tensor,
    form: WideForm | None = None,
) -> Tensor:
    """``pointwise(code_1 @ right_1 + bias_1, ...) @ left.T``.

    On a GPU a kernel does it, forward and backward, where kernels are switched on and there is one for the form.

    Args:
        inputs: The linear maps into the hidden layer: one, or two where one gates the other.
        pointwise: From rows of all inputs and of all masks to rows of the hidden layer, entry by entry.
        masks: ``(T, H)``, passed to ``pointwise`` beside the inputs; for dropout.
        left: ``(R, H)``, left half of the layer behind.
        form: What ``pointwise`` computes, if it is of a form that kernels may know.

    Shape:
        ``(T, R)``, in the dtype of ``left``.
    """
    tensors = [tensor for part in inputs for tensor in part]
    has_data = not isinstance(left, FakeTensor)  # as when memory is estimated
    kernel_form = form if has_data and takes_kernel(inputs, form, masks, left) else None
    return _WideCode.apply(pointwise, kernel_form, len(inputs), left, *tensors, *masks)


class _WideCode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pointwise: Pointwise, form: WideForm | None, num_inputs: int, left: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        ctx.pointwise, ctx.form, ctx.num_inputs = pointwise, form, num_inputs
        ctx.save_for_backward(left, *tensors)
        inputs, masks = _group(num_inputs, tensors)
        if form is not None:
            return wide_code_kernels.wide_code(inputs, form, masks, left)
        code_TR = left.new_empty(inputs[0].code.shape[0], left.shape[0])
        with without_autocast(left):
            for chunk in _chunks(code_TR, left.shape[1]):
                hidden = pointwise([part.rows(chunk) for part in inputs], [mask[chunk] for mask in masks])
                torch.mm(hidden.to(left.dtype), left.T, out=code_TR[chunk])
        return code_TR

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        left, *tensors = ctx.saved_tensors
        inputs, masks = _group(ctx.num_inputs, tensors)
        with without_autocast(left):
            if torch.is_grad_enabled():
                found = _differentiable_gradients(ctx, grads[0], [left, *tensors[: 3 * ctx.num_inputs]], masks)
            elif ctx.form is not None:
                found = _kernel_gradients(grads[0], inputs, ctx.form, masks, left)
            else:
                found = _Backward(ctx.pointwise, left, inputs, masks).run(grads[0])
        return (None, None, None, *found, *(None for _ in masks))


def _kernel_gradients(
    grad: Tensor, inputs: list[WideInput], form: WideForm, masks: list[Tensor], left: Tensor
) -> list[Tensor | None]:
    """Gradients of ``left``, then of code, right and bias of each input, in their dtypes."""
    found = wide_code_kernels.wide_code_backward(grad, inputs, form, masks, left)
    owners = [left, *(tensor for part in inputs for tensor in part)]
    return [
        None if each is None or owner is None else each.to(owner.dtype)
        for each, owner in zip(found, owners, strict=True)
    ]


class _Backward:
    """The gradients, gathered chunk after chunk."""

    def __init__(self, pointwise: Pointwise, left: Tensor, inputs: list[WideInput], masks: list[Tensor]) -> None:
        self.pointwise, self.left, self.inputs, self.masks = pointwise, left, inputs, masks
        exact = torch.promote_types(left.dtype, torch.float32)  # sums over chunks are not rounded to 16 bits
        self.dleft = torch.zeros_like(left, dtype=exact)
        self.drights = [torch.zeros_like(part.right, dtype=exact) for part in inputs]
        self.dbiases = [None if part.bias is None else torch.zeros_like(part.bias, dtype=exact) for part in inputs]
        self.dcodes = [torch.empty_like(part.code) for part in inputs]

    def run(self, dcode_TR: Tensor) -> list[Tensor | None]:
        """Gradients of ``left``, then of code, right and bias of each input."""
        for chunk in _chunks(dcode_TR, self.left.shape[1]):
            self._add_chunk(chunk, dcode_TR[chunk])
        found: list[Tensor | None] = [self.dleft.to(self.left.dtype)]
        for part, dcode, dright, dbias in zip(self.inputs, self.dcodes, self.drights, self.dbiases, strict=True):
            found += [dcode, dright.to(part.right.dtype), None]
            if part.bias is not None and dbias is not None:
                found[-1] = dbias.to(part.bias.dtype)
        return found

    def _add_chunk(self, chunk: slice, dcode: Tensor) -> None:
        wides = [part.rows(chunk).requires_grad_() for part in self.inputs]
        with torch.enable_grad():
            hidden = self.pointwise(wides, [mask[chunk] for mask in self.masks]).to(self.left.dtype)
        dwides = torch.autograd.grad(hidden, wides, dcode @ self.left)
        _add_product(self.dleft, dcode.T, hidden.detach())
        for index, (part, dwide) in enumerate(zip(self.inputs, dwides, strict=True)):
            torch.mm(dwide, part.right.T, out=self.dcodes[index][chunk])
            _add_product(self.drights[index], part.code[chunk].T, dwide)
            if (dbias := self.dbiases[index]) is not None:
                dbias += dwide.sum(0, dtype=dbias.dtype)


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


def _chunks(code_TR: Tensor, hidden: int) -> Iterator[slice]:
    """Rows that are computed at a time; of a tensor without entries only the first."""
    step = max(1, CHUNK_ENTRIES // hidden)
    stop = min(step, len(code_TR)) if isinstance(code_TR, FakeTensor) else len(code_TR)
    for start in range(0, stop, step):
        yield slice(start, start + step)
