"""hf_comera/memory/fp8_linears.py: which layers of a model multiply in FP8, and what stays as it was."""

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

from hf_comera import CoatAdamW, estimate_memory, set_activation_policy, set_fp8_linears
from hf_comera.memory import SavedBytes
from hf_comera.memory import fp8_linears as fp8_linears_file

LLAMA = LlamaConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
GPT2 = GPT2Config(
    vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
BERT = BertConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
)  # fmt: skip
MODELS = {  # class, config, layers that multiply in FP8 from 64 features on, layers that do not
    "llama": (AutoModelForCausalLM, LLAMA, 2 * 5, 2 * 2 + 1),
    "gpt2": (AutoModelForCausalLM, GPT2, 2 * 4, 1),
    "bert": (AutoModelForSequenceClassification, BERT, 2 * 6 + 1, 1),
}
IDS = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(0))

all_models = pytest.mark.parametrize(
    ("model_class", "config", "num_in_fp8", "num_left_out"), MODELS.values(), ids=MODELS
)


def build(model_class: type = AutoModelForCausalLM, config: object = LLAMA) -> PreTrainedModel:
    torch.manual_seed(0)
    return model_class.from_config(copy.deepcopy(config))


def loss_of(model: nn.Module) -> torch.Tensor:
    is_classifier = hasattr(model, "classifier")
    return model(input_ids=IDS, labels=IDS[:, 0] % 2 if is_classifier else IDS).loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@all_models
def test_report_names_what_was_changed_and_what_was_not(model_class, config, num_in_fp8, num_left_out):
    report = set_fp8_linears(build(model_class, config), 64)
    assert len(report.in_fp8) == num_in_fp8
    assert len(report.left_out) == num_left_out
    assert f"{num_in_fp8} linear layers multiply in FP8" in str(report)
    assert str(report).count("do not: ") == len(set(report.left_out.values()))


@all_models
def test_model_learns_nearly_the_same(model_class, config, num_in_fp8, num_left_out):
    model = build(model_class, config)
    plain, plain_gradients = loss_of(model).item(), gradients(model)
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    set_fp8_linears(model, 64)
    found, found_gradients = loss_of(model).item(), gradients(model)
    assert found != plain
    assert abs(found - plain) < 0.02 * plain
    flat, plain_flat = (
        torch.cat([grad.flatten() for grad in one.values()]) for one in (found_gradients, plain_gradients)
    )
    assert (flat - plain_flat).norm() < 0.2 * plain_flat.norm()
    assert list(model.state_dict()) == names
    set_fp8_linears(model, None)
    assert loss_of(model).item() == plain
    assert [type(module) for module in model.modules()] == classes


def test_default_takes_only_large_layers(caplog):
    report = set_fp8_linears(build())
    assert "set_fp8_linears(min_features=2048) changes nothing" in caplog.text
    assert not report.in_fp8
    assert "fewer than 2048 features on one side" in report.left_out.values()


def test_training_and_evaluation_multiply_alike():
    model = build()
    set_fp8_linears(model, 64)
    trained = loss_of(model.train()).item()
    with torch.no_grad():
        assert loss_of(model.eval()).item() == trained


def test_the_loss_falls():
    model = build()
    set_fp8_linears(model, 64)
    set_activation_policy(model, "fp8")
    optimizer = CoatAdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("policy", ["keep", "rank"])
def test_exact_policies_stay_exact(policy):
    model = build()
    set_fp8_linears(model, 64)
    expected = gradients(model)
    set_activation_policy(model, policy)
    assert all(torch.equal(grad, expected[name]) for name, grad in gradients(model).items())


def test_less_is_saved():
    model, totals = build(), []
    for features in (None, 64):
        set_fp8_linears(model, features)
        with SavedBytes(model.parameters()) as saved:
            loss = loss_of(model)
        totals.append(saved.total)
        del loss
    assert 0 < totals[1] < 0.95 * totals[0]


def test_adapters_are_found_and_trained():
    model = build()
    set_fp8_linears(model, 64)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False))
    loss_of(adapted).backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name for name in trained)


def test_checkpoints_are_those_of_the_plain_model(tmp_path):
    model = build()
    set_fp8_linears(model, 64)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_memory_can_be_estimated():
    model = build()
    set_fp8_linears(model, 64)
    assert "keep" in str(estimate_memory(model, batch_size=2, seq_len=16))


class Derived(nn.Linear):
    """A layer of a class of its own."""


def test_what_is_left_alone():
    layers = {"derived": Derived(64, 64), "odd": nn.Linear(72, 64), "exact": nn.Linear(64, 64, dtype=torch.float64)}
    report = set_fp8_linears(nn.ModuleDict(layers), 64)
    assert not report.in_fp8
    assert report.left_out == {"odd": "sizes are not multiples of 16", "exact": "weights are torch.float64"}


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = inner


def test_logits_are_left_alone_within_a_wrapper():
    report = set_fp8_linears(Wrapper(build()), 64)
    assert report.left_out["module.lm_head"] == "it gives the logits"


def test_layers_whose_forward_was_replaced_are_left_out():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    add_hook_to_module(layers[0], ModelHook())
    report = set_fp8_linears(layers, 64)
    assert report.in_fp8 == ["1"]
    assert "forward was replaced" in report.left_out["0"]
    add_hook_to_module(layers[1], ModelHook())
    with pytest.raises(ValueError, match="the forward of 1 was replaced since it multiplies in FP8"):
        set_fp8_linears(layers, None)


def test_a_second_call_decides_anew():
    model = build()
    assert len(set_fp8_linears(model, 64).in_fp8) == 10
    assert len(set_fp8_linears(model, 128).in_fp8) == 0
    assert not any("Fp8" in type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("features", [0, -1, True, 2.5], ids=str)
def test_bad_sizes_are_refused_and_nothing_is_changed(features):
    model = build()
    with pytest.raises(ValueError, match="must be a positive integer, such as 2048"):
        set_fp8_linears(model, features)
    assert type(model.lm_head) is nn.Linear


def test_a_device_that_cannot_is_refused_and_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(fp8_linears_file, "fp8_device_refusal", lambda device: "the GPU is too old")
    model = build()
    with pytest.raises(ValueError, match="set_fp8_linears: the GPU is too old"):
        set_fp8_linears(model, 64)
    assert not any("Fp8" in type(module).__name__ for module in model.modules())


def test_something_else_than_a_model_is_refused():
    with pytest.raises(TypeError, match="set_fp8_linears needs a model"):
        set_fp8_linears("model")
