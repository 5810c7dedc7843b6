"""Call of the CUDA kernel of a step of AdamW with moments in E4M3: many parameters in place, on the current stream.

The operator and its plain-torch reference are in ``hf_comera/optim/coat_adamw.py``. CPU tensors go to the emulated
kernel, which is for tests.
"""

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from hf_comera.ops.cuda.dispatch import check_taken, place_refusal
from hf_comera.ops.cuda.library import check_status, current_stream, kernel_library, on_device

__all__ = ["coat_adamw_refusal", "coat_adamw_step"]

DTYPES = (torch.float32, torch.bfloat16)


def coat_adamw_refusal(values: Sequence[Tensor], gradients: Sequence[Tensor], state: Sequence[Tensor]) -> str | None:
    """Why the kernel cannot take parameters with this state, or None where it can."""
    dtypes = {value.dtype for value in values}, {gradient.dtype for gradient in gradients}
    if any(len(kind) > 1 or not kind <= set(DTYPES) for kind in dtypes):
        found = " with gradients in ".join(", ".join(sorted(map(str, kind))) for kind in dtypes)
        return f"the kernel takes torch.float32 and torch.bfloat16, one at a time, not {found}"
    if not all(each.is_contiguous() for each in (*values, *state)):
        return "a parameter or its state is not contiguous"
    return place_refusal(*values, *gradients, *state)


def coat_adamw_step(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    rate: Tensor | None,
    *,
    sizes: Sequence[int],
    lr: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
) -> None:
    """Step all parameters in place, a launch for each 48.

    Args:
        values: Parameters.
        gradients: Theirs.
        moments: For each parameter codes and scales of the first moment, then of the second.
        steps: Counted already.
        rate: Learning rate in a tensor; read on the device where it is on one, so that captured steps follow it.
        sizes: For each parameter its rows, the entries of a row, within which groups of 128 lie, and a third number.
        lr: Learning rate without a ``rate``.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.

    Shape:
        values, gradients and codes (``uint8``) alike; scales ``(rows, groups of a row, 2)``, steps ``()``, in float32.

    Raises:
        NoKernelError: If the kernel cannot take them; ``coat_adamw_refusal`` says so beforehand.
    """
    check_taken("coat_adamw", coat_adamw_refusal(values, gradients, [*moments, *steps]))
    gradients, device = [gradient.contiguous() for gradient in gradients], values[0].device
    of_device = None if rate is None or rate.device != device else rate.to(torch.float32)
    number = (lr if rate is None else float(rate)) if of_device is None else 0.0
    library, address = kernel_library(device), None if of_device is None else of_device.data_ptr()
    dtypes = values[0].dtype == torch.bfloat16, gradients[0].dtype == torch.bfloat16
    tensors = zip(values, gradients, *(moments[place::4] for place in range(4)), steps, strict=True)
    rows = [
        (*(each.data_ptr() for each in of_one), *sizes[3 * place : 3 * place + 2])
        for place, of_one in enumerate(tensors)
    ]
    for start in range(0, len(rows), size := library.hf_comera_coat_adamw_tensors()):
        numbers = list(chain.from_iterable(part := rows[start : start + size]))
        table = (ctypes.c_int64 * len(numbers))(*numbers)
        with on_device(device):
            status = library.hf_comera_coat_adamw(
                *(ctypes.addressof(table), len(part), *dtypes, address, number, *betas, eps, weight_decay),
                current_stream(device),
            )
        check_status(library, status, "coat_adamw")
