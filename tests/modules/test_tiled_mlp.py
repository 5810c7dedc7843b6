"""hf_comera/modules/tiled_mlp.py: feed-forward blocks of every row compute what their modules do, in chunks."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig
from transformers.activations import ACT2FN
from transformers.models.bert.modeling_bert import BertLayer

from hf_comera.modules import TTLinear
from hf_comera.modules.block import Block, text_digest
from hf_comera.modules.fusion import fuse, unfuse
from hf_comera.modules.tiled_mlp import ACTIVATION_NAMES, FORWARDS, PARTS, TiledLayer
from hf_comera.ops import bit_dropout
from hf_comera.ops import tiled_mlp as operator
from tests.modules.test_fusion import SERVED, TiledChunk, TiledMLP, class_of

pytestmark = pytest.mark.usefixtures("small_chunks")

IN, HIDDEN = 16, 40
CLASSES = [*SERVED[TiledMLP], *SERVED[TiledChunk]]
each_class = pytest.mark.parametrize("name", CLASSES)


def layer(in_features, out_features, ranks=5, bias=True, dtype=torch.float64):
    made = TTLinear(in_features, out_features, ranks=ranks, bias=bias, dtype=dtype)
    made.draw(in_features**-0.5)
    if bias:
        nn.init.normal_(made.bias, std=0.5)
    return made


def block(name, act="silu", rate=0.0, bias=True, dtype=torch.float64):
    """A module of this class with the parts that its row names, and nothing else."""
    made = class_of(name)
    module = made.__new__(made)
    nn.Module.__init__(module)
    spec = FORWARDS.get(text_digest(made.forward)) or PARTS[text_digest(made.ff_chunk)]
    joint = spec.gate == spec.inner
    setattr(module, spec.inner, layer(IN, 2 * HIDDEN if joint else HIDDEN, bias=bias, dtype=dtype))
    setattr(module, spec.outer, layer(HIDDEN, IN, bias=bias, dtype=dtype))
    if spec.gate is not None and not joint:
        setattr(module, spec.gate, layer(IN, HIDDEN, bias=bias, dtype=dtype))
    setattr(module, spec.activation, ACT2FN[act])
    for dropout in filter(None, (spec.hidden_dropout, spec.output_dropout)):
        setattr(module, dropout, nn.Dropout(rate))
    module.chunk_size_feed_forward, module.seq_len_dim = 0, 1  # of DistilBERT's
    fuse(module)
    assert isinstance(module, Block)
    assert module.refusal() is None
    return module


def random_input(rows=9, dtype=torch.float64):
    return torch.randn(2, rows, IN, dtype=dtype, requires_grad=True)


def results(module, x, call=None):
    """Output and all gradients."""
    torch.manual_seed(1)
    y = (call or module)(x)
    grad = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view_as(y).to(y.dtype)
    tensors = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    return [y, *torch.autograd.grad(y, tensors, grad, allow_unused=True, materialize_grads=True)]


def unfused(module):
    plain = copy.deepcopy(module)
    unfuse(plain)
    return plain


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@each_class
def test_modules_of_every_row(name, bias):
    module, x = block(name, bias=bias), random_input()
    torch.testing.assert_close(results(module, x), results(unfused(module), x))


@pytest.mark.parametrize("act", ACTIVATION_NAMES)
@pytest.mark.parametrize("name", ["clip.CLIPMLP", "llama.LlamaMLP"])
def test_activations_of_transformers(name, act):
    module, x = block(name, act), random_input()
    torch.testing.assert_close(results(module, x), results(unfused(module), x), rtol=1e-6, atol=1e-6)


FUNCTIONS = [
    functional.gelu,
    functional.relu,
    functional.silu,
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.SiLU(),
    ACT2FN["gelu_python"],
]
UNKNOWN = [
    *(ACT2FN[name] for name in ("tanh", "sigmoid", "gelu_10", "mish", "leaky_relu", "laplace", "relu6")),
    functional.selu,
    torch.tanh,
    lambda x: functional.gelu(x, approximate="tanh"),
    nn.GELU(approximate="tanh"),
]


@pytest.mark.parametrize("function", [*FUNCTIONS, *UNKNOWN])
def test_activations_that_are_functions_or_unknown(function):
    module, x = block("clip.CLIPMLP"), random_input()
    del module.activation_fn
    module.activation_fn = function
    assert (module.refusal() is None) == (function in FUNCTIONS)
    torch.testing.assert_close(results(module, x), results(unfused(module), x))


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (0, IN), (2, 0, IN), (2, 3, 4, IN)], ids=str)
@pytest.mark.parametrize("name", ["llama.LlamaMLP", "phi3.Phi3MLP", "t5.T5DenseGatedActDense"])
def test_inputs_of_any_shape(name, shape):
    module, x = block(name), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(results(module, x), results(unfused(module), x))


@pytest.mark.parametrize("ranks", [0, 1, 5, 8])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_ranks(part, ranks):
    module, x = block("llama.LlamaMLP"), random_input()
    old = getattr(module, part)
    setattr(module, part, layer(old.in_features, old.out_features, ranks=ranks or [0] * 5) if ranks else removed(old))
    fuse(module)
    assert module.refusal() is None
    torch.testing.assert_close(results(module, x), results(unfused(module), x))


def removed(old):
    made = TTLinear(old.in_features, old.out_features, ranks=[0] * (old.num_cores - 1), dtype=torch.float64)
    nn.init.normal_(made.bias)
    return made


@pytest.mark.parametrize("name", ["t5.T5DenseActDense", "t5.T5DenseGatedActDense", "wav2vec2.Wav2Vec2FeedForward"])
def test_dropout_of_the_hidden_layer(name, monkeypatch):
    """What is dropped is dropped forward and backward, as often as asked for, and scaled."""
    module, x, drawn = block(name, rate=0.25), random_input(200), []
    spec, draw = module.spec, bit_dropout.draw_kept
    monkeypatch.setattr(bit_dropout, "draw_kept", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    if spec.output_dropout is not None:
        setattr(module, spec.output_dropout, nn.Identity())
    found = results(module, x)
    (bits,) = drawn
    kept = bit_dropout.kept_factors(bits, HIDDEN, 1 / 0.75, torch.float64)
    assert (kept == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    plain = unfused(module)
    setattr(plain, spec.hidden_dropout, Times(kept.view(2, 200, HIDDEN)))
    torch.testing.assert_close(found, results(plain, x))
    assert not drawn[1:]
    module.eval()(x)
    assert not drawn[1:]


class Times(nn.Module):
    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def forward(self, x):
        return x * self.factors


@pytest.mark.parametrize("use_reentrant", [True, False])
@each_class
def test_checkpointed(name, use_reentrant):
    module, x = block(name, rate=0.3), random_input()
    again = lambda x: checkpoint(module, x, use_reentrant=use_reentrant)  # noqa: E731
    module.zero_grad()
    torch.manual_seed(1)
    y = again(x)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))
    found = [y, x.grad, *(parameter.grad for parameter in module.parameters())]
    torch.testing.assert_close(found, results(module, x.detach().requires_grad_()))


@pytest.mark.parametrize("frozen", ["inner", "gate", "outer"])
def test_frozen_layers(frozen):
    module, x = block("llama.LlamaMLP"), random_input()
    getattr(module, getattr(module.spec, frozen)).requires_grad_(False)
    torch.testing.assert_close(results(module, x), results(unfused(module), x))
    x = x.detach().requires_grad_()
    module.requires_grad_(False)
    torch.testing.assert_close(results(module, x), results(unfused(module), x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each_class
def test_without_gradients(name, mode):
    module, x = block(name).eval(), random_input()
    with mode():
        found, expected = module(x), unfused(module)(x)
    torch.testing.assert_close(found.clone(), expected.clone())
    assert not found.requires_grad


@pytest.mark.parametrize("name", ["clip.CLIPMLP", "llama.LlamaMLP", "phi3.Phi3MLP", "t5.T5DenseGatedActDense"])
def test_autocast(name):
    module, x = block(name, dtype=torch.float32), random_input(dtype=torch.float32)
    exact = results(unfused(module), x)

    def in_16_bits(each):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return each(x)

        return results(each, x, call)

    ours, plain = in_16_bits(module), in_16_bits(unfused(module))
    assert ours[0].dtype == plain[0].dtype == torch.bfloat16
    for one, other, third in zip(ours, plain, exact, strict=True):
        assert (one - third).norm() <= 2 * (other - third).norm() + 1e-6


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["clip.CLIPMLP", "llama.LlamaMLP", "phi3.Phi3MLP", "t5.T5DenseGatedActDense"])
def test_nothing_as_wide_as_the_hidden_layer_is_saved_or_made(name, autocast, monkeypatch):
    monkeypatch.setattr(operator, "CHUNK_ENTRIES", {"cpu": 20 * HIDDEN, "cuda": 20 * HIDDEN})
    module, x, saved = block(name, dtype=torch.float32), random_input(200, torch.float32), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast), Widest() as widest:
        module(x).sum().backward()
    assert not [shape for shape in saved if shape.numel() >= 400 * HIDDEN]
    assert widest.entries <= 20 * 2 * HIDDEN or widest.entries <= 400 * 2 * 8, "a chunk, or two latents"


class Widest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most entries of a tensor that is made, seen below operators too."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, torch.Tensor):
                self.entries = max(self.entries, each.numel())
        return found


def bert_layer(**settings):
    config = BertConfig(hidden_size=32, num_attention_heads=4, intermediate_size=48, **settings)
    config._attn_implementation = "sdpa"
    module = BertLayer(config)
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.Linear):
            module.set_submodule(name, layer(part.in_features, part.out_features))
    fuse(module)
    return module.double()


@pytest.mark.parametrize("chunk_size", [0, 3])
def test_layers_of_bert_feed_forward_in_chunks_too(chunk_size):
    module = bert_layer(chunk_size_feed_forward=chunk_size, hidden_dropout_prob=0.0)
    module.attention.self.dropout.p = 0.0
    assert isinstance(module, TiledLayer)
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(results(module, x), results(unfused(module), x))


@each_class
def test_rows_name_what_their_classes_have(name):
    made = class_of(name)
    spec = FORWARDS.get(text_digest(made.forward)) or PARTS[text_digest(made.ff_chunk)]
    names = (spec.inner, spec.outer, spec.activation, spec.gate, spec.hidden_dropout, spec.output_dropout)
    assert all(f"self.{part} = " in inspect.getsource(made.__init__) for part in filter(None, names))
