"""hf_comera/modules/fusion.py: every architecture that is served computes with blocks what it does without them."""

import pytest
import torch

from hf_comera.modules.block import Block
from hf_comera.ops import bit_dropout
from tests.fused_models import FUSED, blocks_that_run, inputs_of, layers_called, model_of, results, unfused
from tests.integration.test_training_loops import CHECKPOINTING

WITH_WORDS = [name for name, row in FUSED.items() if row.reads in ("words", "pairs")]
WITH_ATTENTION = [name for name, row in FUSED.items() if row.attentions]
FEW = ["bert", "gpt2", "llama", "qwen3", "t5-gated"]
each_of_few = pytest.mark.parametrize("name", FEW)


@pytest.mark.parametrize("name", FUSED)
def test_loss_outputs_and_gradients(name, monkeypatch):
    model, inputs = model_of(name), inputs_of(name)
    assert blocks_that_run(model) == (FUSED[name].attentions, FUSED[name].forwards)
    expected = results(unfused(model), inputs)
    called = layers_called(model, monkeypatch)
    found = results(model, inputs)
    blocks = [part for part, block in model.named_modules() if isinstance(block, Block) and block.refusal() is None]
    assert not [layer for layer in called if layer.startswith(tuple(f"{block}." for block in blocks))]
    torch.testing.assert_close(found, expected)
    sizes = sorted(tensor.abs().max() for tensor in expected.values())
    assert sizes[len(sizes) // 4] > 1e-4, "so small that differences would not show"


@pytest.mark.parametrize("padding", ["left", "none"])
@pytest.mark.parametrize("name", WITH_WORDS)
def test_padding_on_the_left_and_none(name, padding):
    model, inputs = model_of(name), inputs_of(name, padding=padding)
    if padding == "none":
        del inputs["attention_mask"]
    torch.testing.assert_close(results(model, inputs), results(unfused(model), inputs))


@pytest.mark.parametrize("name", [name for name, row in FUSED.items() if row.is_causal])
def test_training_without_a_cache(name):
    model, inputs = model_of(name), inputs_of(name, padding="left")
    expected = results(unfused(model), inputs, use_cache=False)
    torch.testing.assert_close(results(model, inputs, use_cache=False), expected)


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_eager_attention_gives_the_same_weights(name):
    model, inputs = model_of(name), inputs_of(name)
    model.set_attn_implementation("eager")
    assert blocks_that_run(model)[0] == FUSED[name].attentions
    found = results(model, inputs, output_attentions=True)
    assert found["attentions.0"].shape[1] == 4
    # the models' eager attention has its softmax in float32
    torch.testing.assert_close(found, results(unfused(model), inputs, output_attentions=True), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how Transformers calls it, and torch compiles it
@pytest.mark.parametrize("name", ["bert", "opt", "llama", "qwen3"])
def test_flex_attention(name):
    model, inputs = model_of(name, dtype=torch.float32).eval(), inputs_of(name, dtype=torch.float32)
    model.set_attn_implementation("flex_attention")
    plain = unfused(model)
    assert blocks_that_run(model)[0] == FUSED[name].attentions
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-4)


@pytest.fixture
def draws_of_torch(monkeypatch):
    """Dropout is torch's in blocks and out of them, so that the same seed drops the same."""
    monkeypatch.setattr(bit_dropout, "serves", lambda *args: False)


@pytest.mark.usefixtures("draws_of_torch")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "layoutlm", "distilbert", "vit", "gpt2", "opt", "llama", "mistral", "phi3"])
def test_the_same_is_dropped(name, implementation):
    model, inputs = model_of(name, dropout=0.2), inputs_of(name)
    model.set_attn_implementation(implementation)
    expected = results(unfused(model), inputs)
    torch.testing.assert_close(results(model, inputs), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(expected["loss"], results(model, inputs, seed=2)["loss"])


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "llama", "t5-gated", "wav2vec2"])
def test_dropout_is_that_of_the_modules_over_many_draws(name, many, monkeypatch):
    if many:
        monkeypatch.setattr(bit_dropout, "MIN_NUMEL", 1)
    model, inputs = model_of(name, dropout=0.01), inputs_of(name)
    draws = {key: tensor[:1].expand(600, *tensor.shape[1:]).contiguous() for key, tensor in inputs.items()}
    with torch.no_grad():
        found, plain = model(**draws).logits, unfused(model)(**draws).logits
    assert found.std(0).mean() == pytest.approx(plain.std(0).mean().item(), rel=0.2)
    assert (found.mean(0) - plain.mean(0)).abs().mean() < 0.15 * found.std(0).mean()


@each_of_few
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(name, use_reentrant):
    model, inputs = model_of(name, dropout=0.1), inputs_of(name)
    expected = results(model, inputs, use_cache=False)
    getattr(model, f"{CHECKPOINTING}_checkpointing_enable")({"use_reentrant": use_reentrant})
    torch.testing.assert_close(results(model, inputs, use_cache=False), expected)


@each_of_few
@pytest.mark.parametrize("cached", [{}, {"use_cache": False}], ids=["cache", "no-cache"])
def test_two_backward_passes(name, cached):
    model, inputs = model_of(name), inputs_of(name)
    loss = model(**inputs, **({} if name == "bert" else cached)).loss
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters, allow_unused=True), first)


def body_and_inputs(name):
    """The model behind its embeddings, which have no second derivatives."""
    model = model_of(name).eval()
    body = model.encoder if name.startswith("t5") else model.base_model
    body.requires_grad_(False)
    for key, parameter in body.named_parameters():
        parameter.requires_grad_("layer" in key or key.startswith("h."))
    options = {} if name.startswith(("t5", "bert")) else {"use_cache": False}
    return body, {"inputs_embeds": torch.randn(2, 5, 32, dtype=torch.float64), **options}


def scalar(body, parameters, inputs):
    y = torch.func.functional_call(body, parameters, kwargs=inputs)[0]
    return (y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum()


@pytest.fixture
def attention_by_products():
    """The only core attention of torch with second and forward derivatives."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@each_of_few
@pytest.mark.usefixtures("attention_by_products")
def test_second_derivatives(name):
    model, inputs = body_and_inputs(name)

    def penalty(body):
        trained = {key: parameter for key, parameter in body.named_parameters() if parameter.requires_grad}
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(
            scalar(body, trained, inputs), list(trained.values()), create_graph=True, **options
        )
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), list(trained.values()), **options)

    torch.testing.assert_close(penalty(model), penalty(unfused(model)))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3"])
@pytest.mark.usefixtures("attention_by_products")
def test_transforms_of_functions(name):
    model, inputs = body_and_inputs(name)
    found = []
    for body in (model, unfused(model)):
        states = {key: parameter.detach() for key, parameter in body.named_parameters() if parameter.requires_grad}
        tangents = {key: torch.cos(torch.arange(p.numel(), dtype=p.dtype)).view_as(p) for key, p in states.items()}
        function = lambda states, body=body: scalar(body, states, inputs)  # noqa: E731
        found.append([torch.func.grad(function)(states), torch.func.jvp(function, (states,), (tangents,))])
        batched = {key: torch.stack([p, 2 * p]) for key, p in states.items()}
        found[-1].append(torch.vmap(function)(batched))
    torch.testing.assert_close(*found)


@each_of_few
@pytest.mark.parametrize("cached", [False, True])
def test_autocast(name, cached):
    model, inputs = model_of(name, dtype=torch.float32), inputs_of(name)
    options = {} if name == "bert" or cached else {"use_cache": False}
    exact = results(unfused(model), inputs, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = results(model, inputs, **options), results(unfused(model), inputs, **options)
    errors = [sum((each[key].double() - exact[key]).square().sum() for key in exact) for each in (found, plain)]
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: tensor.dtype for key, tensor in plain.items()}
    assert errors[0] < 4 * errors[1]


@each_of_few
def test_models_in_16_bits(name):
    inputs = inputs_of(name)
    exact = results(model_of(name), inputs)
    model = model_of(name, dtype=torch.bfloat16)
    found, plain = results(model, inputs), results(unfused(model), inputs)
    errors = [sum((each[key].double() - exact[key]).square().sum() for key in exact) for each in (found, plain)]
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: tensor.dtype for key, tensor in plain.items()}
    assert errors[0] < 4 * errors[1]


FAST_TO_COMPILE = ["bert", "gpt2", "llama", "vit", "t5"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_TO_COMPILE else pytest.mark.slow) for name in FUSED]
)
def test_one_graph_of_compiled_code(name):
    model, inputs = model_of(name), inputs_of(name)
    expected = results(model, inputs)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(model, inputs), expected)


@pytest.mark.parametrize("name", ["bert", "t5-gated", "llama"])
def test_compiled_dropout(name, monkeypatch):
    monkeypatch.setattr(bit_dropout, "MIN_NUMEL", 1)
    model, inputs = model_of(name, dropout=0.1), inputs_of(name)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    found = results(model, inputs)
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert not torch.equal(found["loss"], results(model, inputs, seed=2)["loss"])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5-gated"])
def test_programs_of_torch_export(name):
    model, inputs = model_of(name).eval(), inputs_of(name)
    options = {} if name in ("bert", "vit") else {"use_cache": False}
    program = torch.export.export(model, (), {**inputs, **options})
    assert "hf_comera" not in {
        node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")
    }
    with torch.no_grad():
        torch.testing.assert_close(program.module()(**inputs, **options).logits, model(**inputs).logits)
