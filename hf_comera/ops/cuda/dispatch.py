"""How CUDA kernels come to run: each is registered for its operator, whose body in plain torch does what it refuses.

An operator names its kernel once, ``register_cuda_kernel(operator, kernel)``; nothing else asks at a call which of the
two it is. Where an operator costs more than the products it stands for, on a CPU, its caller has one condition,
:func:`kernels_serve`, and composes plain torch elsewhere.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from hf_comera.ops.cuda.library import kernels_refusal
from hf_comera.ops.cuda.switch import kernels_are_wanted

__all__ = [
    "NoKernelError",
    "check_taken",
    "kernels_serve",
    "place_refusal",
    "register_cuda_kernel",
    "serve_devices",
]

_served: tuple[str, ...] = ("cuda",)
_registered: list[tuple[CustomOpDef, Callable[..., Any]]] = []


class NoKernelError(ValueError):
    """A kernel does not take these arguments: raised before anything is launched."""


def register_cuda_kernel(operator: CustomOpDef, kernel: Callable[..., Any]) -> None:
    """Have ``kernel`` be the implementation of ``operator`` on CUDA devices.

    The operator's own body runs in its place while kernels are switched off, and for what ``kernel`` refuses.

    Args:
        operator: Made by ``torch.library.custom_op``.
        kernel: Takes the same arguments; raises :class:`NoKernelError` for those it does not take.
    """
    _registered.append((operator, kernel))
    for kind in {"cuda", *_served}:
        _register(kind, operator, kernel)


def serve_devices(*kinds: str) -> None:
    """Have kernels serve tensors on these kinds of devices and no others.

    Args:
        kinds: ``"cuda"``, or ``"cpu"`` for the emulation, which is for tests and rehearsals.
    """
    global _served
    _served = kinds
    for kind in kinds:
        for operator, kernel in _registered:
            _register(kind, operator, kernel)


def kernels_serve(device: torch.device) -> bool:
    """Whether operators on tensors of ``device`` run by kernels now: switched on, and there to be used.

    Never in code that is compiled and under function transforms, which see through plain torch only.
    """
    return (
        kernels_are_wanted()
        and device.type in _served
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and (device.type == "cpu" or kernels_refusal(device) is None)
    )


def place_refusal(*tensors: Tensor) -> str | None:
    """Why no kernel takes tensors that lie where these do, or None where kernels run."""
    devices = {tensor.device for tensor in tensors}
    device = tensors[0].device
    if len(devices) > 1:
        return f"the tensors are on different devices: {', '.join(sorted(map(str, devices)))}"
    if device.type not in ("cpu", "cuda"):
        return f"the kernels run on CUDA devices, not on {device}"
    return kernels_refusal(device) if device.type == "cuda" else None


def check_taken(name: str, reason: str | None) -> None:
    """Refuse what a kernel does not take.

    Args:
        name: Of the kernel.
        reason: Why it does not; None if it does.

    Raises:
        NoKernelError: If there is a reason.
    """
    if reason is not None:
        raise NoKernelError(f"{name} has no kernel for this: {reason}.")


def _register(kind: str, operator: CustomOpDef, kernel: Callable[..., Any]) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        if kernels_are_wanted() and kind in _served:
            with contextlib.suppress(NoKernelError):
                return kernel(*args, **kwargs)
        return operator._init_fn(*args, **kwargs)

    operator.register_kernel(kind, run)
