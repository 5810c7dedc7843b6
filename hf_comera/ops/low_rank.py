"""``x A B + bias``: the product of a tensor-train layer, by its two halves or by the matrix they multiply to.

``W = left.T @ right``. The latent ``x @ left.T`` has one number per rank and token, and ``y = latent @ right``. Saved
for backward are x and the latent; all else is of the size of the cores.

Where kernels serve the device, the products are the operator ``hf_comera::low_rank_linear``, whose body in plain torch
is the reference. Elsewhere they are two differentiable products, which cost less to call on a CPU, and which compilers
and function transforms see through. Second derivatives are theirs everywhere.

Where the dense matrix is faster (``tt/planner.py`` says where), it is multiplied out and applied in plain torch; saved
for backward are then the input, the halves and the matrix.

Source: CoMERA, arXiv:2405.14377, section on contraction paths: two-sided contraction.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear, pad

from hf_comera.ops.autograd import gradients_of
from hf_comera.ops.cuda import low_rank_linear as kernels
from hf_comera.ops.cuda.dispatch import kernels_serve, register_cuda_kernel
from hf_comera.ops.halves import RANK_MULTIPLE, layer_halves
from hf_comera.ops.precision import autocast_input, without_autocast

__all__ = ["bias_as_rank", "dense_linear", "from_latent", "low_rank_linear", "to_latent", "tt_linear"]


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
        latent = to_latent(x, left)
        return from_latent(*bias_as_rank(latent, right, bias, right.shape[0] if rank is None else rank))
    x = autocast_input(x)
    with without_autocast(x):
        return _low_rank_linear(x, left.to(x.dtype), right.to(x.dtype), bias)[0]


def _composed(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``y`` and the latent."""
    latent = to_latent(x, left)
    return from_latent(latent, right, bias), latent


@torch.library.custom_op("hf_comera::low_rank_linear", mutates_args=())
def _low_rank_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _composed(x, left, right, bias)


@_low_rank_linear.register_fake
def _(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], right.shape[1]), x.new_empty(*x.shape[:-1], left.shape[0])


register_cuda_kernel(_low_rank_linear, kernels.low_rank_linear)


@torch.library.custom_op("hf_comera::low_rank_linear_backward", mutates_args=())
def _low_rank_linear_backward(
    grad_y: Tensor, grad_latent: Tensor | None, x: Tensor, latent: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, left, right and bias; those of the halves and the bias in float32 or better."""
    x_TI, latent_TR = x.reshape(-1, x.shape[-1]), latent.reshape(-1, latent.shape[-1])
    dy_TO = grad_y.reshape(-1, grad_y.shape[-1]).to(x.dtype)
    dlatent_TR = dy_TO @ right.T
    if grad_latent is not None:
        dlatent_TR = dlatent_TR + grad_latent.reshape(latent_TR.shape)
    exact = torch.promote_types(x.dtype, torch.float32)
    grads = (dlatent_TR.T @ x_TI, latent_TR.T @ dy_TO, dy_TO.sum(0))
    dleft, dright, dbias = (grad.to(exact) for grad in grads)
    return (dlatent_TR @ left).reshape(x.shape), dleft, dright, dbias


@_low_rank_linear_backward.register_fake
def _(
    grad_y: Tensor, grad_latent: Tensor | None, x: Tensor, latent: Tensor, left: Tensor, right: Tensor
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


def _backward(ctx: Any, grad_y: Tensor | None, grad_latent: Tensor | None) -> tuple[Any, ...]:
    x, left, right, latent = ctx.saved_tensors
    if grad_y is None:
        grad_y = x.new_zeros(*x.shape[:-1], right.shape[1])
    with without_autocast(x):
        if torch.is_grad_enabled():
            grads: Any = _differentiable_gradients(grad_y, x, left, right)
        else:
            grads = _low_rank_linear_backward(grad_y, grad_latent, x, latent, left, right)
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


# Shapes here: I = in features, O = out features, R = middle rank.


def dense_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (left.T @ right) + bias``; differentiable in all four.

    Args:
        x: Input. Under autocast it is cast first.
        left: ``(R, in_features)``; rounded to the dtype of ``x``, in which the matrix is multiplied.
        right: ``(R, out_features)``, likewise.
        bias: ``(out_features,)`` or None.

    Shape:
        ``(..., in_features) -> (..., out_features)``.
    """
    x = autocast_input(x)
    with without_autocast(x):
        weight_OI = right.to(x.dtype).T @ left.to(x.dtype)
        return functional.linear(x, weight_OI, None if bias is None else bias.to(x.dtype))


# Shapes here: I = in features, O = out features, R = rank of the latent, T = tokens.


# Entries of an output from which on a pass over it takes longer than the few small operations that spare one.
WORTH_A_RANK = 1 << 17


def tt_linear(
    x: Tensor,
    cores: list[Tensor],
    num_in: int,
    bias: Tensor | None = None,
    out_features: int | None = None,
) -> Tensor:
    """``x @ W + bias`` for ``W = left.T @ right`` in tensor-train form.

    Args:
        x: Input. Under autocast it is cast first, as ``torch.nn.functional.linear`` does.
        cores: ``(r_{k-1}, n_k, r_k)``; the product of the first ``num_in`` factors is at least ``x.shape[-1]``.
        num_in: How many cores carry input factors; at least 1, and fewer than ``len(cores)``.
        bias: ``(out_features,)`` or None.
        out_features: Output size where the output factors are padded; default is their product.

    Shape:
        ``(..., in_features) -> (..., out_features)``.

    Returns:
        ``y`` in the dtype of ``x`` (of autocast, where it is on).

    Raises:
        ValueError: If the input factors cannot cover the last axis of ``x``.

    Source:
        CoMERA, arXiv:2405.14377.
    """
    covered, all_columns = 1, 1
    for core in cores[:num_in]:
        covered *= core.shape[1]
    for core in cores[num_in:]:
        all_columns *= core.shape[1]
    if x.shape[-1] > covered:
        raise ValueError(
            f"x has {x.shape[-1]} features, but the {num_in} input cores cover {covered}. "
            f"Pass x with a last axis of at most {covered}."
        )
    x = autocast_input(x)
    with without_autocast(x):
        left, right = layer_halves(cores, num_in, x.shape[-1], all_columns if out_features is None else out_features)
    return from_latent(to_latent(x, left), right, bias)


def to_latent(x: Tensor, left: Tensor) -> Tensor:
    """``x @ left.T``.

    Shape:
        ``x`` ``(..., I)``, ``left`` ``(R, I)`` -> ``(..., R)``, in the dtype of ``x`` (of autocast, where it is on).
    """
    x = autocast_input(x)
    with without_autocast(x):
        return linear(x, left.to(x.dtype))


def from_latent(latent: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``latent @ right + bias``.

    Shape:
        ``latent`` ``(..., R)``, ``right`` ``(R, O)``, ``bias`` ``(O,)`` -> ``(..., O)``, in the dtype of ``latent``.
    """
    latent_TR = latent.reshape(-1, latent.shape[-1])
    with without_autocast(latent):
        if bias is None:
            y_TO = latent_TR @ right.to(latent.dtype)
        else:
            y_TO = torch.addmm(bias.to(latent.dtype), latent_TR, right.to(latent.dtype))
    return y_TO.view(*latent.shape[:-1], right.shape[-1])


def bias_as_rank(
    latent: Tensor, right: Tensor, bias: Tensor | None, rank: int, *, always: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments for :func:`from_latent`, with the bias in a rank that padding left empty, if that is faster.

    The latent gets a column of ones and ``right`` the bias as a row. So one product replaces a pass over all of the
    output, and another pass in backward for its gradient. Padding is there anyway.

    Args:
        latent: From :func:`to_latent`.
        right: Right half; its rows from ``rank`` on are zeros, as are the columns of the latent.
        bias: ``(out_features,)`` or None.
        rank: Middle rank of the layer without padding.
        always: Whether to do it in any case, with more padding if need be.

    Shape:
        ``latent`` ``(..., R)``, ``right`` ``(R, O)`` -> the same, or R more by :data:`RANK_MULTIPLE` where there was
        none to spare.

    Returns:
        Latent, right half and bias. They are unchanged on a GPU, whose products add a bias for nothing, and for small
        outputs, without a bias, and where no rank is to spare.
    """
    on_cpu, entries = latent.device.type == "cpu", latent.numel() // latent.shape[-1] * right.shape[1]
    worth = on_cpu and rank < right.shape[0] and entries >= WORTH_A_RANK and not torch.compiler.is_compiling()
    if bias is None or not (worth or always):
        return latent, right, bias
    if rank == right.shape[0]:
        latent, right = pad(latent, (0, RANK_MULTIPLE)), pad(right, (0, 0, 0, RANK_MULTIPLE))
    place = torch.tensor([rank], device=latent.device)
    # filled and copied, not added: entries beside the bias and the column of ones must stay clear of an infinite bias
    return latent.index_fill(-1, place, 1), right.index_copy(0, place, bias.to(right.dtype).unsqueeze(0)), None
