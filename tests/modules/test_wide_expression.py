"""hf_comera/modules/wide_expression.py: which written-down functions are known to kernels, and which are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from hf_comera.modules.wide_hidden import WideHidden
from hf_comera.ops.wide_input import WideForm

KNOWN = {
    "gelu": ("gelu", ACT2FN["gelu"]),
    "nn.GELU": ("gelu", nn.GELU()),
    "gelu_pytorch_tanh": ("gelu_tanh", ACT2FN["gelu_pytorch_tanh"]),
    "gelu_new": ("gelu_tanh", ACT2FN["gelu_new"]),
    "relu": ("relu", ACT2FN["relu"]),
    "torch.relu": ("relu", torch.relu),
    "silu": ("silu", ACT2FN["silu"]),
    "swish": ("silu", ACT2FN["swish"]),
}
UNKNOWN = {
    "nothing": lambda x: x,
    "tanh": torch.tanh,
    "quick_gelu": ACT2FN["quick_gelu"],
    "relu2": ACT2FN["relu2"],
    "scaled": lambda x: functional.silu(2 * x),
    "two in a row": lambda x: functional.relu(functional.gelu(x)),
    "gated by itself": lambda x: functional.gelu(x) * x,
    "doubled": lambda x: 2 * functional.gelu(x),
    "dropped within": lambda x: functional.gelu(functional.dropout(x, 0.5)),
    "dropped twice": lambda x: functional.dropout(functional.dropout(functional.gelu(x), 0.5), 0.5),
}
GATED_UNKNOWN = {
    "both activated": lambda a, b: functional.silu(a) * functional.silu(b),
    "a sum": lambda a, b: functional.silu(a) + b,
    "activation of a product": lambda a, b: functional.silu(a * b),
    "one of two": lambda a, b: functional.silu(a) * a * (b * 0 + 1),
    "no activation": lambda a, b: a * b,
}


def stand_in():
    return WideHidden.of(torch.randn(3, 8), torch.randn(8, 12), torch.randn(12))


@pytest.mark.parametrize(("name", "function"), KNOWN.values(), ids=KNOWN)
def test_known_activations(name, function):
    assert function(stand_in())._hidden.form() == WideForm(name, (0,))
    gate, up = stand_in(), stand_in()
    assert (function(gate) * up)._hidden.form() == WideForm(name, (0, 1))
    turned = up * function(gate)
    assert turned._hidden.form() == WideForm(name, (1, 0))
    assert next(iter(turned._hidden.inputs.values())).code is up._hidden.tensors()[0]


def test_dropout_behind_all():
    for hidden in (functional.gelu(stand_in()), functional.gelu(stand_in()) * stand_in()):
        form = functional.dropout(hidden, 0.25)._hidden.form()
        assert form == WideForm("gelu", tuple(range(len(hidden._hidden.inputs))), 1 / 0.75)


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=UNKNOWN)
def test_everything_else_is_unknown(function):
    assert function(stand_in())._hidden.form() is None


@pytest.mark.parametrize("function", GATED_UNKNOWN.values(), ids=GATED_UNKNOWN)
def test_other_gates_are_unknown(function):
    assert function(stand_in(), stand_in())._hidden.form() is None
