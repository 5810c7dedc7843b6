"""hf_comera/ops/tiled_mlp.py and the layers above it: with kernels they compute what they compute without."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.ops import use_kernels
from hf_comera.ops.bit_dropout import draw_kept
from hf_comera.ops.tiled_mlp import HiddenInput, tiled_mlp

SIZES = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 144, "num_attention_heads": 4}
GPT2 = {"vocab_size": 99, "n_embd": 64, "n_head": 4, "n_layer": 1, "resid_pdrop": 0.0}
T5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 144, "num_heads": 4, "num_layers": 1}
T5 |= {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.2, "decoder_start_token_id": 0}
# class, config, feed-forward blocks, and whether kernels know their nonlinearity
MODELS = {
    "bert": (AutoModelForMaskedLM, BertConfig(**SIZES, num_hidden_layers=2), 2, True),
    "llama": (AutoModelForCausalLM, LlamaConfig(**SIZES, num_hidden_layers=1), 1, True),
    "gpt2": (AutoModelForCausalLM, GPT2Config(**GPT2), 1, True),
    "t5-with-dropout": (AutoModelForSeq2SeqLM, T5Config(**T5), 2, True),
    "quick-gelu": (AutoModelForMaskedLM, BertConfig(**SIZES, num_hidden_layers=1, hidden_act="quick_gelu"), 1, False),
}


def wide_launches(calls):
    return [name for name, _ in calls if name.startswith("tiled_mlp")]


def loss_and_gradients(model, inputs):
    torch.manual_seed(3)
    loss = model(**inputs).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", MODELS)
def test_models(name, calls, served):
    auto_class, config, num_blocks, is_known = MODELS[name]
    model = get_comera_model(auto_class, ComeraConfig(rank=8), config=copy.deepcopy(config)).to(served)
    model.train(name == "t5-with-dropout" and served.type == "cpu")
    ids = torch.randint(3, 99, (2, 7), device=served)
    inputs = {"input_ids": ids, "labels": ids}
    use_kernels(False)
    plain = loss_and_gradients(model, inputs)
    assert wide_launches(calls) == []
    use_kernels()
    found = loss_and_gradients(model, inputs)
    expected = ["tiled_mlp"] * num_blocks + ["tiled_mlp_backward"] * num_blocks
    assert wide_launches(calls) == (expected if is_known else [])
    for mine, torchs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-3, atol=1e-5)


FORMS = {
    "plain": {"activation": "relu"},
    "gated": {"activation": "silu", "gated": True},
    "dropped": {"activation": "gelu", "dropout": 0.2},
    "gated and dropped": {"activation": "gelu_tanh", "gated": True, "dropout": 0.4},
}


def problem(form, device, dtype=torch.float32):
    """A function of its leaves, and these."""

    def random(*shape):
        return (torch.randn(shape) / shape[0] ** 0.5).to(device, dtype).requires_grad_()

    inner, left = HiddenInput(random(9, 8), random(8, 24), random(24)), random(8, 24)
    gate = HiddenInput(random(9, 16), random(16, 24)) if form.get("gated") else None
    bits = draw_kept((9, 24), form["dropout"]).to(device) if "dropout" in form else None
    options = {"activation": form["activation"], "gate": gate, "bits": bits, "share": 1 - form.get("dropout", 0)}
    leaves = [left, *(tensor for part in (inner, gate or ()) for tensor in part if tensor is not None)]
    return lambda: tiled_mlp(inner, left, **options), leaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients(form, dtype, calls, served):
    compute, leaves = problem(form, served, dtype)
    results = []
    for wanted in (False, True):
        use_kernels(wanted)
        latent = compute()
        results.append([latent, *torch.autograd.grad(latent.float().square().sum(), leaves)])
    assert wide_launches(calls) == ["tiled_mlp", "tiled_mlp_backward"]
    tolerance = {"rtol": 5e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(results[1], results[0], **tolerance)


def test_second_derivatives_are_those_of_torch(calls, served):
    compute, leaves = problem(FORMS["gated"], served)
    results = []
    for wanted in (False, True):
        use_kernels(wanted)
        first = torch.autograd.grad(compute().square().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    assert wide_launches(calls) == ["tiled_mlp", "tiled_mlp_backward"]  # not for the graph of the first derivatives
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


def test_what_no_kernel_knows_runs_in_torch(calls, served):
    for form, wanted in (({"activation": "quick_gelu"}, True), (FORMS["gated"], False)):
        use_kernels(wanted)
        compute, leaves = problem(form, served)
        torch.autograd.grad(compute().sum(), leaves)
    assert wide_launches(calls) == []
