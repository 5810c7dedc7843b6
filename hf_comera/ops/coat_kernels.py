"""Call of the CUDA kernel of a step of AdamW with moments in E4M3: many parameters in place, on the current stream.

The plain-torch reference is ``hf_comera/optim/coat_adamw.py`` with ``hf_comera/ops/fp8.py``. CPU tensors go to the
emulated kernel, which is for tests.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_comera.ops.kernel_calls import current_stream, on_device
from hf_comera.ops.kernels import check_status, kernel_library, kernels_refusal

__all__ = ["QuantisedParameter", "coat_adamw_refusal", "coat_adamw_step"]

DTYPES = (torch.float32, torch.bfloat16)


class QuantisedParameter(NamedTuple):
    """A parameter, and what is kept of its moments; all contiguous.

    Shape:
        value and gradient: any; codes alike, ``uint8``; scales ``(rows, groups of a row, 2)``, float32; step ``()``,
        float32, counted already.
    """

    value: Tensor
    gradient: Tensor
    first: Tensor
    first_scales: Tensor
    second: Tensor
    second_scales: Tensor
    step: Tensor
    num_rows: int
    length: int
    """Entries of a row; groups of 128 lie within rows."""


def coat_adamw_refusal(parameter: QuantisedParameter) -> str | None:
    """Why the kernel cannot take a parameter, or None where it can."""
    value, gradient = parameter.value, parameter.gradient
    if value.dtype not in DTYPES or gradient.dtype not in DTYPES:
        return (
            f"the kernel takes torch.float32 and torch.bfloat16, not {value.dtype} with gradients in {gradient.dtype}"
        )
    tensors = [each for each in parameter if isinstance(each, Tensor)]
    if not all(each.device == value.device for each in tensors):
        return f"its state is on {sorted({str(each.device) for each in tensors})}"
    if not all(each.is_contiguous() for each in tensors):
        return "it is not contiguous"
    if value.device.type not in ("cpu", "cuda"):
        return f"the kernel runs on CUDA devices, not on {value.device}"
    return kernels_refusal(value.device) if value.device.type == "cuda" else None


def coat_adamw_step(
    parameters: Sequence[QuantisedParameter],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Step all parameters in place, a launch for each 48 of equal dtypes and device.

    Args:
        parameters: Those that :func:`coat_adamw_refusal` has nothing against.
        lr: A tensor is read on the device where it is on one, so that captured steps follow it.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.
    """
    for batch in _alike(parameters):
        value = batch[0].value
        rate = lr.detach().to(torch.float32) if isinstance(lr, Tensor) and lr.device == value.device else None
        library = kernel_library(value.device)
        dtypes = value.dtype == torch.bfloat16, batch[0].gradient.dtype == torch.bfloat16
        rule = (float(lr) if rate is None else 0.0, *betas, eps, weight_decay)
        address = None if rate is None else rate.data_ptr()
        for start in range(0, len(batch), size := library.hf_comera_coat_adamw_tensors()):
            rows = batch[start : start + size]
            table = (ctypes.c_int64 * (len(rows) * len(rows[0])))(*_addresses(rows))
            with on_device(value.device):
                status = library.hf_comera_coat_adamw(
                    ctypes.addressof(table), len(rows), *dtypes, address, *rule, current_stream(value.device)
                )
            check_status(library, status, "coat_adamw")
    torch.autograd.graph.increment_version([parameter.value for parameter in parameters])


def _alike(parameters: Iterable[QuantisedParameter]) -> Iterable[list[QuantisedParameter]]:
    """Those of equal dtypes and device together."""
    batches: dict[object, list[QuantisedParameter]] = {}
    for parameter in parameters:
        key = parameter.value.dtype, parameter.gradient.dtype, parameter.value.device
        batches.setdefault(key, []).append(parameter)
    return batches.values()


def _addresses(parameters: Sequence[QuantisedParameter]) -> Iterable[int]:
    """The table that the kernel takes, row by row."""
    for parameter in parameters:
        yield from (each.data_ptr() if isinstance(each, Tensor) else each for each in parameter)
