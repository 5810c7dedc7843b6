"""hf_comera/modules/block.py: a module that has become a block is still what it was, and is told by its text."""

import copy
import importlib.util
import io
import pickle

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_comera.modules import TTLinear
from hf_comera.modules.block import (
    Block,
    exchange_class,
    is_watched,
    layer_refusal,
    restore_class,
    text_digest,
)
from hf_comera.modules.tiled_mlp import TiledMLP
from tests.fused_models import inputs_of, model_of


def fused_mlp():
    mlp = model_of("llama").model.layers[0].mlp
    assert isinstance(mlp, TiledMLP)
    return mlp


def test_a_block_has_the_name_of_its_class_and_is_one():
    mlp = fused_mlp()
    assert isinstance(mlp, LlamaMLP)
    assert type(mlp) is not LlamaMLP
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(mlp), name) == getattr(LlamaMLP, name)
    assert type(mlp).home == LlamaMLP.__module__
    assert repr(mlp).startswith("LlamaMLP(")
    assert type(mlp) is type(model_of("llama").model.layers[1].mlp), "one class for all"


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch": saved_and_loaded,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5-gated"])
def test_copies_are_blocks_with_weights_of_their_own(name, copied):
    model, inputs = model_of(name).eval(), inputs_of(name)
    other = copied(model)
    blocks, others = ([part for part in each.modules() if isinstance(part, Block)] for each in (model, other))
    assert [type(block) for block in blocks] == [type(block) for block in others]
    assert len(blocks) >= 4 - (name == "t5-gated") * 2
    with torch.no_grad():
        expected = model(**inputs).logits
        torch.testing.assert_close(other(**inputs).logits, expected)
        for parameter in other.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(model(**inputs).logits, expected)


def test_restored_modules_are_as_they_were():
    mlp = fused_mlp()
    restore_class(mlp)
    assert type(mlp) is LlamaMLP
    restore_class(mlp)
    assert type(mlp) is LlamaMLP
    exchange_class(mlp, TiledMLP)
    assert isinstance(mlp, TiledMLP)
    assert type(mlp).__mro__[:3] == (type(mlp), TiledMLP, Block) or isinstance(mlp, LlamaMLP)


PLAIN = """
def forward(self, x, scale=2):
    y = self.inner(x) * scale
    return self.outer(y)
"""
SAME = {
    "comment": PLAIN.replace("    y =", "    # what is wide\n    y ="),
    "docstring": PLAIN.replace("    y =", '    """As others do it."""\n    y ='),
    "annotations": PLAIN.replace("x, scale=2)", "x: int, scale: int = 2) -> int"),
    "layout": PLAIN.replace("self.inner(x) * scale", "(\n        self.inner(x)\n        * scale\n    )"),
    "decorator": "import functools\n\n\n@functools.cache" + PLAIN,
}
OTHERS = {
    "another argument": PLAIN.replace("x, scale", "x, size, scale"),
    "another operation": PLAIN.replace("* scale", "+ scale"),
    "one line more": PLAIN.replace("    return", "    y = y + 1\n    return"),
    "another part": PLAIN.replace("self.outer", "self.out"),
}


@pytest.fixture
def function_of(tmp_path):
    """The function ``forward`` of a text, from a file."""

    def made(text):
        path = tmp_path / f"text_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.forward

    return made


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_the_digest_is_that_of_what_is_done(text, function_of):
    assert text_digest(function_of(text)) == text_digest(function_of(PLAIN))


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_another_text_has_another_digest(text, function_of):
    assert text_digest(function_of(text)) != text_digest(function_of(PLAIN))


def test_what_has_no_text_has_no_digest():
    scope = {}
    exec(PLAIN, scope)
    for function in (scope["forward"], len, None, lambda x: x):
        assert text_digest(function) is None


def tt(**settings):
    return TTLinear(32, 32, **{"ranks": 4, **settings})


def with_forward(layer):
    layer.forward = layer.forward
    return layer


def with_offload_hook(layer):
    layer._hf_hook = object()
    return layer


def with_hook(register):
    layer = tt()
    getattr(layer, register)(lambda *args: None)
    return layer


class Derived(TTLinear):
    """Of somebody else."""


REFUSED = {
    "dense": (nn.Linear(4, 4), "a Linear is in the place of a TTLinear"),
    "none": (None, "a NoneType is in the place"),
    "derived": (Derived(32, 32, ranks=4), "a Derived is in the place"),
    "forward": (with_forward(tt()), "a hook watches"),
    "offload": (with_offload_hook(tt()), "a hook watches"),
    **{
        name: (with_hook(f"register_{name}"), "a hook watches")
        for name in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    },
    "rank": (tt(ranks=32), "middle rank 32 is so high"),
}


@pytest.mark.parametrize(("layer", "reason"), REFUSED.values(), ids=REFUSED)
def test_layers_that_a_block_leaves_to_the_own_forward(layer, reason):
    assert layer_refusal([tt(), tt(bias=False)]) is None
    assert layer_refusal([tt(ranks=[0] * 5)]) is None, "without ranks it is zero, or its bias"
    assert reason in layer_refusal([tt(), layer])


def test_hooks_of_transformers_that_gather_outputs_watch_nothing():
    model, inputs = model_of("bert").eval(), inputs_of("bert")
    attention = model.bert.encoder.layer[0].attention
    with torch.no_grad():
        model(**inputs, output_attentions=True, output_hidden_states=True)
    assert attention.self._forward_hooks, "they stay"
    assert not is_watched(attention.self)
    assert attention.refusal() is None
    attention.self.register_forward_hook(lambda *args: None)
    assert is_watched(attention.self)
    assert not is_watched(torch.nn.functional.gelu), "a function"
