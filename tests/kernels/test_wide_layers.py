"""hf_comera/ops/wide_code.py and the layers above it: with kernels they compute what they compute without."""

import copy

import pytest
import torch
from hf_comera.ops.wide_code import wide_code
from hf_comera.ops.wide_input import WideForm, WideInput
from tests.ops.test_wide_code import FORMS
from torch.nn import functional
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
from hf_comera.modules import wide_hidden
from hf_comera.ops import use_kernels

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


@pytest.fixture(autouse=True)
def _every_hidden_layer_is_wide_enough(monkeypatch):
    monkeypatch.setattr(wide_hidden, "WORTH_CHUNKS", 1)


def wide_launches(calls):
    return [name for name, _ in calls if name.startswith("wide_code")]


def loss_and_gradients(model, inputs):
    torch.manual_seed(3)
    loss = model(**inputs).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", MODELS)
def test_models(name, calls, served):
    auto_class, config, num_blocks, is_known = MODELS[name]
    model = get_comera_model(auto_class, ComeraConfig(rank=8), config=copy.deepcopy(config)).to(served)
    # on a GPU a hidden layer that is written out draws its masks in another way
    model.train(name == "t5-with-dropout" and served.type == "cpu")
    ids = torch.randint(3, 99, (2, 7), device=served)
    inputs = {"input_ids": ids, "labels": ids}
    use_kernels(False)
    plain = loss_and_gradients(model, inputs)
    assert wide_launches(calls) == []
    use_kernels()
    found = loss_and_gradients(model, inputs)
    expected = ["wide_code"] * num_blocks + ["wide_code_backward"] * num_blocks
    assert wide_launches(calls) == (expected if is_known else [])
    for mine, torchs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-3, atol=1e-5)


def problem(device, dtype=torch.float32):
    def random(*shape):
        return (torch.randn(shape) / shape[0] ** 0.5).to(device, dtype).requires_grad_()

    inputs = [WideInput(random(9, rank), random(rank, 24), bias) for rank, bias in ((8, random(24)), (16, None))]
    return inputs, lambda wides, _: wides[1] * functional.silu(wides[0]), random(8, 24)


def leaves(inputs, left):
    return [left, *(tensor for part in inputs for tensor in part if tensor is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_come_back_in_their_dtypes(dtype, calls, served):
    inputs, pointwise, left = problem(served, dtype)
    results = []
    for wanted in (False, True):
        use_kernels(wanted)
        code = wide_code(inputs, WideForm("silu", (0, 1)) if wanted else pointwise, [], left)
        results.append([code, *torch.autograd.grad(code.float().square().sum(), leaves(inputs, left))])
    assert wide_launches(calls) == ["wide_code", "wide_code_backward"]
    tolerance = {"rtol": 5e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(results[1], results[0], **tolerance)


def test_second_derivatives_are_those_of_torch(calls, served):
    inputs, pointwise, left = problem(served)
    results = []
    for wanted in (False, True):
        use_kernels(wanted)
        code = wide_code(inputs, WideForm("silu", (0, 1)) if wanted else pointwise, [], left)
        first = torch.autograd.grad(code.square().sum(), leaves(inputs, left), create_graph=True)
        results.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves(inputs, left)))
    assert wide_launches(calls) == ["wide_code", "wide_code_backward"]  # not for the graph of the first derivatives
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


def test_without_a_form_or_the_switch_no_kernel_runs(calls, served):
    inputs, pointwise, left = problem(served)
    wide_code(inputs, pointwise, [], left)
    use_kernels(False)
    wide_code(inputs, WideForm("silu", (0, 1)), [], left)
    assert wide_launches(calls) == []


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_kind_of_form(form, calls, served):
    inputs, _, left = problem(served)
    inputs, masks = inputs[: len(form.order)], [torch.rand(9, 24, device=served) < 0.8] * (form.scale is not None)
    results = []
    for wanted in (True, False):
        use_kernels(wanted)
        code = wide_code(inputs, form, masks, left)
        results.append([code, *torch.autograd.grad(code.square().sum(), leaves(inputs, left))])
    assert wide_launches(calls) == ["wide_code", "wide_code_backward"]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
