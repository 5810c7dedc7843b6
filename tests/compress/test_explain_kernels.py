"""hf_comera/compress/explain.py: says which layers CUDA kernels serve, and why not the others."""

import pytest
import torch
from torch import nn

from hf_comera import ComeraConfig, explain, get_comera_model
from hf_comera.compress.explain import kernel_notes
from hf_comera.modules import TTLinear
from hf_comera.ops.cuda import dispatch, switch
from tests.architectures import ARCHITECTURES


def compressed(name="gpt2", **settings):
    architecture = ARCHITECTURES[name]
    return get_comera_model(
        architecture.auto_class, ComeraConfig(**{"rank": 4} | settings), config=architecture.new_config()
    )


def notes(model, dtype=torch.float32, kind="cpu"):
    return " ".join(kernel_notes(model, torch.device(kind), dtype))


@pytest.fixture
def on(monkeypatch):
    monkeypatch.setattr(dispatch, "_served", ("cpu",))
    monkeypatch.setattr(switch, "_wanted", True)


def test_off_or_impossible(monkeypatch):
    model = compressed()
    assert notes(model) == ""
    assert "CUDA kernels are off, since none has run on a GPU yet" in notes(model, kind="cuda")
    monkeypatch.setattr(switch, "_wanted", True)
    assert notes(model) == ""
    if not torch.cuda.is_available():
        assert "CUDA kernels cannot run: torch finds no CUDA device. Operators run" in notes(model, kind="cuda")


@pytest.mark.usefixtures("on")
def test_on():
    found = notes(compressed())
    assert "make the halves of 8 layers in one call, and their gradients." in found
    assert "look up the rows of transformer.wte; heads tied to them stay in plain torch." in found
    assert "not by CUDA kernels" not in found
    assert found in " ".join(explain(compressed(), 2, 9).notes)


@pytest.mark.usefixtures("on")
def test_what_the_kernels_cannot_take():
    found = notes(compressed().double(), torch.float64)
    assert "Halves of transformer.h.0.attn.c_attn and 7 others are made in plain torch, not by CUDA kernels" in found
    assert "Lookups of transformer.wte are made in plain torch, not by CUDA kernels: they take float32 tables" in found
    assert "make the halves of" not in found
    mixed = nn.Sequential(TTLinear(12, 12, ranks=3), TTLinear(12, 12, ranks=3).double())
    found = notes(mixed)
    assert "halves of 1 layers" in found
    assert "Halves of 1 are made in plain torch, not by CUDA kernels: they take and make float32 and bfloat16" in found
    assert notes(nn.Linear(2, 2)) == ""
