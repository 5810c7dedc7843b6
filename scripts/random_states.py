"""The states of the random number generators that a run draws from, Python's, NumPy's and torch's, for JSON."""

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Any]:
    """The present states, that of ``device`` among them.

    Args:
        device: What this process computes on.
    """
    version, numbers, gauss = random.getstate()
    name, keys, *others = np.random.get_state()
    states = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), *others],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type != "cpu":
        states[device.type] = _text(torch.get_device_module(device).get_rng_state())
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Draw from here on as after :func:`random_states`; a device of another type than then draws on as it is."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *others = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *others))
    torch.set_rng_state(_tensor(states["torch"]))
    if device.type in states:
        torch.get_device_module(device).set_rng_state(_tensor(states[device.type]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
