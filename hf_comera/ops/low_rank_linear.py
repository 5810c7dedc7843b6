"""The operator ``hf_comera::low_rank_linear``: both thin products of a layer in one call, by CUDA kernels if asked.

``code = x left^T`` and ``y = code right + bias``. The plain-torch body below is the reference. On a CUDA device
the kernels of ``kernels/`` run in its place once they are switched on: none of them has run on a GPU yet, so nothing
takes them by itself. Second derivatives are those of ``ops/tt_linear.py`` only.
"""

from typing import Any

import torch
from torch import Tensor

from hf_comera.ops import low_rank_kernels
from hf_comera.ops.kernel_switch import kernels_are_wanted
from hf_comera.ops.precision import without_autocast
from hf_comera.ops.tt_linear import from_code, to_code

__all__ = ["low_rank_linear"]


def low_rank_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ left.T @ right + bias``, through the kernels if ``x`` is on a GPU and they are switched on.

    Args:
        x: Input, in the dtype of the halves.
        left: Half in front of the code.
        right: Half behind it.
        bias: ``(O,)`` or None.

    Shape:
        x ``(..., I)``, left ``(R, I)``, right ``(R, O)`` -> ``(..., O)``, in the dtype of ``x``.
    """
    y, _ = _low_rank_linear(x, left, right, bias)
    return y


@torch.library.custom_op("hf_comera::low_rank_linear", mutates_args=())
def _low_rank_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    code = to_code(x, left)
    return from_code(code, right, bias), code


@_low_rank_linear.register_fake
def _(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], right.shape[1]), x.new_empty(*x.shape[:-1], left.shape[0])


@_low_rank_linear.register_kernel("cuda")
def _(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if not kernels_are_wanted() or low_rank_kernels.low_rank_linear_refusal(x, left, right):
        return _low_rank_linear._init_fn(x, left, right, bias)
    return low_rank_kernels.low_rank_linear(x, left, right, bias)


@torch.library.custom_op("hf_comera::low_rank_linear_backward", mutates_args=())
def _low_rank_linear_backward(
    grad_y: Tensor,
    grad_code: Tensor | None,
    x: Tensor,
    code: Tensor,
    left: Tensor,
    right: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, left, right and bias; those of the halves and the bias in float32 or better."""
    x_TI, code_TR = x.reshape(-1, x.shape[-1]), code.reshape(-1, code.shape[-1])
    dy_TO = grad_y.reshape(-1, grad_y.shape[-1]).to(x.dtype)
    dcode_TR = dy_TO @ right.T
    if grad_code is not None:
        dcode_TR = dcode_TR + grad_code.reshape(code_TR.shape)
    exact = torch.promote_types(x.dtype, torch.float32)
    grads = (dcode_TR.T @ x_TI, code_TR.T @ dy_TO, dy_TO.sum(0))
    dleft, dright, dbias = (grad.to(exact) for grad in grads)
    return (dcode_TR @ left).reshape(x.shape), dleft, dright, dbias


@_low_rank_linear_backward.register_fake
def _(
    grad_y: Tensor,
    grad_code: Tensor | None,
    x: Tensor,
    code: Tensor,
    left: Tensor,
    right: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exact = torch.promote_types(x.dtype, torch.float32)
    dleft, dright, dbias = (x.new_empty(shape, dtype=exact) for shape in (left.shape, right.shape, right.shape[1:]))
    return x.new_empty(x.shape), dleft, dright, dbias


@_low_rank_linear_backward.register_kernel("cuda")
def _(
    grad_y: Tensor,
    grad_code: Tensor | None,
    x: Tensor,
    code: Tensor,
    left: Tensor,
    right: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not kernels_are_wanted() or low_rank_kernels.low_rank_linear_refusal(x, left, right):
        return _low_rank_linear_backward._init_fn(grad_y, grad_code, x, code, left, right)
    grads = low_rank_kernels.low_rank_linear_backward(grad_y, grad_code, x, code, left, right)
    assert grads[0] is not None
    return grads[0], grads[1], grads[2], grads[3]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, left, right, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, left, right, output[1])


def _backward(ctx: Any, grad_y: Tensor | None, grad_code: Tensor | None) -> tuple[Any, ...]:
    x, left, right, code = ctx.saved_tensors
    if grad_y is None:
        grad_y = x.new_zeros(*x.shape[:-1], right.shape[1])
    with without_autocast(x):
        dx, dleft, dright, dbias = _low_rank_linear_backward(grad_y, grad_code, x, code, left, right)
    dbias = None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype)
    return dx, dleft.to(left.dtype), dright.to(right.dtype), dbias


_low_rank_linear.register_autograd(_backward, setup_context=_save)
