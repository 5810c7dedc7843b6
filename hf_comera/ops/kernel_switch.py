"""Whether CUDA kernels were asked for: none of them has run on a GPU yet, so nothing takes them by itself."""

import os

import torch

__all__ = ["kernels_are_wanted", "kernels_serve", "use_kernels"]

_SWITCH = "HF_COMERA_KERNELS"
_wanted = os.environ.get(_SWITCH, "0") not in ("", "0")

KERNEL_DEVICES = ("cuda",)
"""Kinds of devices whose tensors layers and optimizers give to kernels; the emulation on a CPU is for tests."""


def use_kernels(wanted: bool = True) -> None:
    """Have CUDA kernels run where they can, from now on in this process; ``HF_COMERA_KERNELS=1`` does it from outside.

    Where they cannot, plain torch runs; ``python -m hf_comera doctor`` and ``hf_comera.explain`` say why.
    """
    global _wanted
    _wanted = wanted


def kernels_are_wanted() -> bool:
    """Whether the kernels were switched on."""
    return _wanted


def kernels_serve(device: torch.device) -> bool:
    """Whether they were, and tensors on ``device`` are theirs to take."""
    return _wanted and device.type in KERNEL_DEVICES
