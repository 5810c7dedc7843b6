"""Both thin products of a layer, ``y = (x left^T) right + bias``: plain torch, or one operator with CUDA kernels.

Where kernels serve the device, the products are the operator ``hf_comera::low_rank_linear``, whose body in plain torch
is the reference. Elsewhere they are two differentiable products, which cost less to call on a CPU, and which compilers
and function transforms see through. Second derivatives are theirs everywhere.
"""

from typing import Any

import torch
from torch import Tensor

from hf_comera.ops.cuda import low_rank_linear as kernels
from hf_comera.ops.cuda.dispatch import kernels_serve, register_cuda_kernel
from hf_comera.ops.gradients import gradients_of
from hf_comera.ops.precision import autocast_input, without_autocast
from hf_comera.ops.tt_linear import bias_as_rank, from_code, to_code

__all__ = ["low_rank_linear"]


def low_rank_linear(
    x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None, *, rank: int | None = None
) -> Tensor:
    """``(x @ left.T) @ right + bias``, by CUDA kernels where they are switched on and take the tensors.

    Args:
        x: Input. Under autocast it is cast first, as ``torch.nn.functional.linear`` does.
        left: Half before the latent.
        right: Half after it.
        bias: ``(O,)`` or None.
        rank: Rows of the halves that are not padding, where there is padding; the bias may use it.

    Shape:
        x ``(..., I)``, left ``(R, I)``, right ``(R, O)`` -> ``(..., O)``, in the dtype of ``x`` (of autocast, where
        it is on).
    """
    if not kernels_serve(x.device):
        latent = to_code(x, left)
        return from_code(*bias_as_rank(latent, right, bias, right.shape[0] if rank is None else rank))
    x = autocast_input(x)
    with without_autocast(x):
        return _low_rank_linear(x, left.to(x.dtype), right.to(x.dtype), bias)[0]


def _composed(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``y`` and the latent."""
    latent = to_code(x, left)
    return from_code(latent, right, bias), latent


@torch.library.custom_op("hf_comera::low_rank_linear", mutates_args=())
def _low_rank_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _composed(x, left, right, bias)


@_low_rank_linear.register_fake
def _(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], right.shape[1]), x.new_empty(*x.shape[:-1], left.shape[0])


register_cuda_kernel(_low_rank_linear, kernels.low_rank_linear)


@torch.library.custom_op("hf_comera::low_rank_linear_backward", mutates_args=())
def _low_rank_linear_backward(
    grad_y: Tensor, grad_code: Tensor | None, x: Tensor, code: Tensor, left: Tensor, right: Tensor
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
    grad_y: Tensor, grad_code: Tensor | None, x: Tensor, code: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exact = torch.promote_types(x.dtype, torch.float32)
    dleft, dright, dbias = (x.new_empty(shape, dtype=exact) for shape in (left.shape, right.shape, right.shape[1:]))
    return x.new_empty(x.shape), dleft, dright, dbias


register_cuda_kernel(_low_rank_linear_backward, kernels.low_rank_linear_backward)


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
        if torch.is_grad_enabled():
            grads: Any = _differentiable_gradients(grad_y, x, left, right)
        else:
            grads = _low_rank_linear_backward(grad_y, grad_code, x, code, left, right)
    dtypes = (x.dtype, left.dtype, right.dtype, ctx.bias_dtype)
    return tuple(
        None if grad is None or dtype is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)
    )


def _differentiable_gradients(grad_y: Tensor, x: Tensor, left: Tensor, right: Tensor) -> list[Tensor | None]:
    """The same with a graph, for second derivatives of ``y``."""

    def y_of(tensors: list[Any]) -> Tensor:
        return _composed(tensors[0], tensors[1], tensors[2], None)[0]

    found = gradients_of(y_of, [x, left, right], grad_y, create_graph=True)
    return [*found, grad_y.reshape(-1, grad_y.shape[-1]).sum(0)]


_low_rank_linear.register_autograd(_backward, setup_context=_save)
