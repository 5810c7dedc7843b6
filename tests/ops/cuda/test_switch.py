"""hf_comera/ops/cuda/switch.py: kernels are off until asked for."""

import runpy

import pytest
import torch

from hf_comera.ops import use_kernels
from hf_comera.ops.cuda import switch
from hf_comera.ops.cuda.switch import kernels_are_wanted


@pytest.mark.parametrize("wanted", [False, True])
def test_the_switch(wanted, monkeypatch):
    monkeypatch.setattr(switch, "_wanted", None)
    use_kernels(wanted)
    assert kernels_are_wanted() is wanted


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "warns"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_asking_in_vain_is_told(wanted, has_gpu, warns, monkeypatch, caplog):
    monkeypatch.setattr(switch, "_wanted", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    use_kernels(wanted)
    assert ("no CUDA device: models run in plain torch" in caplog.text) is warns


@pytest.mark.parametrize(("value", "wanted"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment(value, wanted, monkeypatch):
    monkeypatch.delenv("HF_COMERA_KERNELS", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_COMERA_KERNELS", value)
    assert runpy.run_path(switch.__file__)["kernels_are_wanted"]() is wanted
