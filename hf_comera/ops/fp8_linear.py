"""A linear layer that multiplies in FP8, forward and backward, and keeps its input in FP8.

Source: COAT, arXiv:2410.19313, section 5, and its code: E4M3 for inputs and weights, E5M2 for gradients, a scale for
each tensor. The products are torch's own ``_scaled_mm``.
"""

# Shapes here: T = tokens, I = in features, O = out features.

import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.weak import TensorWeakRef

from hf_comera.ops.fp8 import Fp8Tensor, store_by_tensor
from hf_comera.ops.precision import without_autocast

__all__ = ["FEATURE_MULTIPLE", "fp8_device_refusal", "fp8_linear"]

FEATURE_MULTIPLE = 16
"""``_scaled_mm`` needs inner and outer sizes that are multiples of it."""

_MINIMUM_CAPABILITY = (8, 9)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fp8_device_refusal(device: torch.device) -> str | None:
    """Why a device cannot multiply in FP8, or None where it can. CPUs can, only slowly."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"torch has no FP8 products for devices of type {device.type!r}"
    if torch.version.hip:
        return "AMD GPUs have other FP8 formats"
    capability = torch.cuda.get_device_capability(device)
    if capability >= _MINIMUM_CAPABILITY:
        return None
    name = torch.cuda.get_device_name(device)
    return f"the GPU ({name}) has compute capability {capability[0]}.{capability[1]}, FP8 products need 8.9 or newer"


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, both factors rounded to FP8 first, and likewise the factors of both gradients.

    Saved for backward are the codes of ``x``, one byte an entry, if the weight has a gradient. The weight itself is
    saved if ``x`` has one; it is rounded again there. Sums are float32. Infinite gradients stay infinite or become
    NaN, so that a gradient scaler notices them.

    Args:
        x: Float32, bfloat16 or float16.
        weight: Likewise; both sizes multiples of 16.
        bias: Likewise.

    Returns:
        In the dtype of autocast where that is on, else in that of ``x``.

    Shape:
        x ``(..., I)``, weight ``(O, I)``, bias ``(O,)`` -> ``(..., O)``

    Raises:
        ValueError: If a dtype or a size does not fit.

    Source:
        COAT, arXiv:2410.19313, section 5.
    """
    _check(x, weight)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    y_TO = _Fp8Linear.apply(x, weight, bias, _stored_rows(x), dtype)
    return y_TO.view(*x.shape[:-1], weight.shape[0])  # a view made inside could not be changed in place


class _Last(threading.local):
    """The last input that was rounded: query, key and value share one, and so its codes."""

    x: TensorWeakRef | None = None
    state: Any = None
    stored: Fp8Tensor | None = None


_last = _Last()


def _stored_rows(x: Tensor) -> Fp8Tensor:
    """The codes of ``x``, those of the last call if they are still right.

    Only results of other operations are found again, since torch counts their edits. Inputs and parameters can be
    filled again unseen, for instance by the replay of a CUDA graph.
    """
    if x.grad_fn is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return store_by_tensor(x.reshape(-1, x.shape[-1]))
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    state = x._version, x.shape, stream
    if _last.stored is None or _last.x is None or _last.x() is not x or _last.state != state:
        stored = store_by_tensor(x.reshape(-1, x.shape[-1]))
        _last.x, _last.state, _last.stored = TensorWeakRef(x), state, stored
    return _last.stored


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_TI: Fp8Tensor, dtype: torch.dtype
    ) -> Tensor:
        needs_dx, needs_dweight, _ = ctx.needs_input_grad[:3]
        ctx.save_for_backward(
            weight if needs_dx else None,
            x_TI.codes if needs_dweight else None,
            x_TI.scales if needs_dweight else None,
        )
        ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        with without_autocast(x):
            return _multiply(x_TI, store_by_tensor(weight), dtype, bias=bias, fast_sums=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, codes_TI, x_scale = ctx.saved_tensors
        dy = grads[0]
        dx = dweight = dbias = None
        with without_autocast(dy):
            if weight is not None or codes_TI is not None:
                dy_TO = store_by_tensor(dy, format=torch.float8_e5m2)
            if weight is not None:
                dx = _multiply(dy_TO, _transposed(store_by_tensor(weight)), ctx.x_dtype).view(ctx.x_shape)
            if codes_TI is not None:
                x_TI = Fp8Tensor(codes_TI, x_scale, ctx.x_dtype)
                dweight = _multiply(_transposed(dy_TO), _transposed(x_TI), ctx.weight_dtype)
            if ctx.needs_input_grad[2]:
                dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None


def _multiply(
    rows: Fp8Tensor, columns: Fp8Tensor, dtype: torch.dtype, *, bias: Tensor | None = None, fast_sums: bool = False
) -> Tensor:
    """``rows @ columns.T + bias``: ``(M, K)`` and ``(N, K)`` to ``(M, N)``, the layout that FP8 tensor cores want.

    Fast sums are less exact ones that Hopper has; COAT and others take them forward only.
    """
    if not rows.codes.numel() or not columns.codes.numel():
        zeros = torch.zeros(rows.shape[0], columns.shape[0], dtype=dtype, device=rows.codes.device)
        return zeros if bias is None else zeros + bias.to(dtype)
    is_added_inside = bias is not None and dtype != torch.float32  # the only dtype that takes none
    product = torch._scaled_mm(
        rows.codes,
        columns.codes.T,
        scale_a=rows.scales,
        scale_b=columns.scales,
        bias=bias.to(dtype) if bias is not None and is_added_inside else None,
        out_dtype=dtype,
        use_fast_accum=fast_sums,
    )
    return product if bias is None or is_added_inside else product.add_(bias)


def _transposed(stored: Fp8Tensor) -> Fp8Tensor:
    """The transpose as a contiguous tensor, its last axis filled up with zeros to a multiple of 16."""
    bytes_TN = stored.codes.view(torch.uint8)
    missing = -bytes_TN.shape[0] % FEATURE_MULTIPLE
    bytes_NT = pad(bytes_TN.T, (0, missing)).contiguous()
    return Fp8Tensor(bytes_NT.view(stored.codes.dtype), stored.scales, stored.dtype)


def _check(x: Tensor, weight: Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; FP8 products take {', '.join(map(str, _DTYPES))}. Convert it, for "
                "example with .float()."
            )
    if weight.dim() != 2 or any(size % FEATURE_MULTIPLE for size in weight.shape) or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}; FP8 products need (O, I) and (..., I), "
            f"multiples of {FEATURE_MULTIPLE}, for example (3072, 768). Use torch's linear for others."
        )
