"""Calls of the CUDA kernels of a low-rank layer: torch tensors in and out, on the current stream.

The kernels read the dtype of the activations. Products of bfloat16 have sums in float32. Products of float32 run in
tf32 where torch allows that for matrix products; else each is made from three in tf32, as exact as float32. CPU
tensors go to the emulated kernels, which are for tests.
"""

# Shapes here: T = tokens (any leading axes), I = in features, O = out features, R = rank, a multiple of 8.

import torch
from torch import Tensor

from hf_comera.ops.cuda.dispatch import check_taken, place_refusal
from hf_comera.ops.cuda.library import check_status, current_stream, kernel_library, on_device, pointers
from hf_comera.ops.precision import uses_tf32

__all__ = ["kernel_precision", "low_rank_linear", "low_rank_linear_backward", "low_rank_linear_refusal"]

MAX_RANK = 128


def low_rank_linear_refusal(x: Tensor, left: Tensor, right: Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None where they can.

    Shape:
        x ``(..., I)``, left ``(R, I)``, right ``(R, O)``.
    """
    rank = left.shape[0]
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"the kernels take torch.bfloat16 and torch.float32, not {x.dtype}"
    if not x.dtype == left.dtype == right.dtype:
        return f"x, left and right have different dtypes: {x.dtype}, {left.dtype}, {right.dtype}"
    if rank % 8 or not 8 <= rank <= MAX_RANK:
        return f"the kernels take ranks 8, 16, ..., {MAX_RANK}, not {rank}"
    if x.shape[-1] != left.shape[1] or right.shape[0] != rank:
        return f"shapes do not fit: x {tuple(x.shape)}, left {tuple(left.shape)}, right {tuple(right.shape)}"
    return place_refusal(x, left, right)


def low_rank_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``latent = x left^T`` and ``y = latent right + bias`` in one launch.

    Shape:
        x ``(..., I)``, left ``(R, I)``, right ``(R, O)``, bias ``(O,)``: y ``(..., O)``, latent ``(..., R)``, both
        in the dtype of ``x``.

    Raises:
        NoKernelError: If the kernels cannot take the tensors; ``low_rank_linear_refusal`` says so beforehand.
    """
    _check(x, left, right)
    x, left, right = x.contiguous(), left.contiguous(), right.contiguous()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    (rank, in_features), out_features = left.shape, right.shape[1]
    y = x.new_empty(*x.shape[:-1], out_features)
    latent = x.new_empty(*x.shape[:-1], rank)
    tensors = pointers(x, left, right, bias, y, latent)
    sizes = (x.shape[:-1].numel(), in_features, out_features, rank)
    library = kernel_library(x.device)
    with on_device(x.device):
        status = library.hf_comera_low_rank_linear(kernel_precision(x), *tensors, *sizes, current_stream(x.device))
    check_status(library, status, "low_rank_linear")
    return y, latent


def low_rank_linear_backward(
    grad_y: Tensor,
    grad_latent: Tensor | None,
    x: Tensor,
    latent: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    needs_dx: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of ``low_rank_linear``; the same bits each time.

    Shape:
        grad_y ``(..., O)``, grad_latent and latent ``(..., R)``: dx as ``x``, in its dtype (None unless ``needs_dx``),
        dleft ``(R, I)``, dright ``(R, O)`` and dbias ``(O,)`` in float32.

    Raises:
        NoKernelError: If the kernels cannot take the tensors.
    """
    _check(x, left, right)
    grad_y, x, latent = grad_y.to(x.dtype).contiguous(), x.contiguous(), latent.contiguous()
    grad_latent = None if grad_latent is None else grad_latent.to(x.dtype).contiguous()
    left, right = left.contiguous(), right.contiguous()
    (rank, in_features), out_features = left.shape, right.shape[1]
    sizes = (x.shape[:-1].numel(), in_features, out_features)
    library, precision = kernel_library(x.device), kernel_precision(x)
    dx = torch.empty_like(x) if needs_dx else None
    grads = [x.new_empty(shape, dtype=torch.float32) for shape in (left.shape, right.shape, (out_features,))]
    dlatent = torch.empty_like(latent)
    num_chunks = library.hf_comera_low_rank_linear_chunks(precision, *sizes)
    partials = x.new_empty(num_chunks, sum(grad.numel() for grad in grads), dtype=torch.float32)
    tensors = pointers(grad_y, grad_latent, x, latent, left, right, dx, *grads, dlatent, partials)
    with on_device(x.device):
        status = library.hf_comera_low_rank_linear_backward(
            precision, *tensors, *sizes, rank, current_stream(x.device)
        )
    check_status(library, status, "low_rank_linear_backward")
    return dx, grads[0], grads[1], grads[2]


def _check(x: Tensor, left: Tensor, right: Tensor) -> None:
    check_taken("low_rank_linear", low_rank_linear_refusal(x, left, right))


def kernel_precision(x: Tensor) -> int:
    """The number of ``kernels/fragments.h``: bf16, tf32, or float32 as exact as it is without tensor cores."""
    if x.dtype == torch.bfloat16:
        return 0
    return 1 if uses_tf32() else 2
