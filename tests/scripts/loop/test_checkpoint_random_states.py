"""scripts/loop/checkpoint.py: once states came back through JSON, what is drawn is what was drawn before."""

import json
import random

import numpy as np
import torch

from loop.checkpoint import random_states, set_random_states

CPU = torch.device("cpu")


def draw():
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), *torch.randn(3).tolist()]


def test_states_come_back_through_json():
    random.gauss(0, 1)  # and NumPy's below: of two normal numbers that are drawn at once the second waits
    np.random.randn(1)
    kept = json.loads(json.dumps(random_states(CPU)))
    expected = draw()
    assert draw() != expected
    set_random_states(kept, CPU)
    assert draw() == expected


def test_a_device_of_its_own_state(monkeypatch):
    class Device:
        state = torch.arange(16, dtype=torch.uint8)

        def get_rng_state(self):
            return self.state

        def set_rng_state(self, state):
            self.state = state

    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    kept = json.loads(json.dumps(random_states(torch.device("cuda"))))
    device.state = None
    set_random_states(kept, CPU)  # resumed on the CPU: there is nothing to set
    assert device.state is None
    set_random_states(kept, torch.device("cuda"))
    assert torch.equal(device.state, Device.state)
