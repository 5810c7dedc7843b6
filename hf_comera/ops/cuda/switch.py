"""Whether CUDA kernels were asked for: none of them has run on a GPU yet, so nothing takes them by itself."""

import logging
import os

import torch

__all__ = ["kernels_are_wanted", "use_kernels"]

LOGGER = logging.getLogger(__name__)
_SWITCH = "HF_COMERA_KERNELS"
_wanted = os.environ.get(_SWITCH, "0") not in ("", "0")


def use_kernels(wanted: bool = True) -> None:
    """Have CUDA kernels run where they can, from now on in this process; ``HF_COMERA_KERNELS=1`` does it from outside.

    Where they cannot, plain torch runs; a warning in the log, ``python -m hf_comera doctor`` and
    ``hf_comera.explain`` say why.
    """
    global _wanted
    _wanted = wanted
    if wanted and not torch.cuda.is_available():
        LOGGER.warning("CUDA kernels were asked for, but torch finds no CUDA device: models run in plain torch.")


def kernels_are_wanted() -> bool:
    """Whether the kernels were switched on."""
    return _wanted
