"""hf_comera/memory/attach.py: a policy comes, goes and travels with its model, and never joins somebody else's."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.memory import ActivationPolicy, activation_policy, set_activation_policy
from hf_comera.memory.policy import NAMED_POLICIES
from tests.architectures import ARCHITECTURES, every_architecture
from tests.memory.policy_runs import assert_same, model_of, run

GPT2, BERT = ARCHITECTURES["gpt2"], ARCHITECTURES["bert-mlm"]
OWN = ActivationPolicy(attention="recompute", min_bytes=1)


def switches(model):
    """Of all modules: what of checkpointing they have as their own."""
    return {
        name: {key: value for key, value in vars(module).items() if "gradient_checkpointing" in key}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
@every_architecture
def test_a_policy_is_set_replaced_and_taken_off(architecture, is_compressed):
    model = model_of(architecture, is_compressed, 0.0)
    hooks, before = len(model.get_input_embeddings()._forward_hooks), switches(model)
    for policy in ("rank", "fp8", OWN, "keep", "rank+fp8") * 2:
        set_activation_policy(model, policy)
        assert activation_policy(model) == NAMED_POLICIES.get(policy, OWN)
        assert model.is_activation_checkpointing == (policy != "keep")
    assert len(model.get_input_embeddings()._forward_hooks) == hooks
    set_activation_policy(model, None)
    set_activation_policy(model, None)
    assert activation_policy(model) is None
    assert switches(model) == before


def test_an_unknown_policy_changes_nothing():
    model = GPT2.new_model()
    set_activation_policy(model, "rank")
    with pytest.raises(ValueError, match="'fast' is unknown"):
        set_activation_policy(model, "fast")
    assert activation_policy(model) == NAMED_POLICIES["rank"]
    with pytest.raises(TypeError, match=r"needs a model.* and got str"):
        set_activation_policy("gpt2", "rank")


def test_models_without_layers_are_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    for policy in ("rank", "rank+fp8", "fp8", OWN):
        with pytest.raises(ValueError, match=r"Sequential has no layer that can be checkpointed.*or use 'keep'"):
            set_activation_policy(model, policy)
    for policy in ("keep", None):
        set_activation_policy(model, policy)
    assert activation_policy(model) is None


def through_bytes(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_bytes], ids=["deepcopy", "pickle"])
def test_copies_have_the_policy_and_may_lose_it(copied):
    model, inputs = model_of(BERT, copied is copy.deepcopy, 0.1), BERT.training_inputs()
    plain = run(model, inputs, None)
    set_activation_policy(model, OWN)
    again = copied(model)
    assert activation_policy(again) == OWN
    found = run(again, inputs, None, set_policy=lambda model, policy: None)
    assert_same(found, plain)
    assert found.saved_bytes < plain.saved_bytes
    set_activation_policy(again, None)
    assert activation_policy(model) == OWN
    assert run(again, inputs, None).saved_bytes > found.saved_bytes


def test_a_policy_stays_when_the_model_is_compressed():
    model, inputs = model_of(BERT, False, 0.0), BERT.training_inputs()
    set_activation_policy(model, "rank")
    model = get_comera_model(model, ComeraConfig(rank=4)).train()
    assert activation_policy(model) == NAMED_POLICIES["rank"]
    found = run(model, inputs, None, set_policy=lambda model, policy: None)
    assert_same(run(model, inputs, None), found)


def test_the_later_call_decides_for_a_layer():
    model, inputs = model_of(BERT, True, 0.1), BERT.training_inputs()
    plain, all_of_it = run(model, inputs, None), run(model, inputs, "rank")
    layers = model.bert.encoder.layer
    set_activation_policy(layers[1], "keep")
    assert activation_policy(model) is None
    assert activation_policy(layers[1]) == NAMED_POLICIES["keep"]
    mixed = run(model, inputs, None, set_policy=lambda model, policy: None)
    assert_same(mixed, plain)
    assert all_of_it.saved_bytes < mixed.saved_bytes < plain.saved_bytes
    set_activation_policy(model, "rank")
    assert activation_policy(layers[1]) == NAMED_POLICIES["rank"]
    set_activation_policy(model, None)
    set_activation_policy(layers, "rank")
    assert activation_policy(model) == NAMED_POLICIES["rank"]


@pytest.mark.parametrize("policy", ["rank", "rank+fp8", "fp8"])
def test_gradient_checkpointing_that_is_on_is_left_alone(policy):
    model = model_of(BERT, True, 0.0)
    model.activation_checkpointing_enable()
    before = switches(model)
    with pytest.raises(ValueError, match=r"is on in 2 of the 2 layers .*activation_checkpointing_disable\(\) first"):
        set_activation_policy(model, policy)
    for quiet in ("keep", None):
        set_activation_policy(model, quiet)
    assert switches(model) == before
    assert activation_policy(model) is None
    model.activation_checkpointing_disable()
    set_activation_policy(model, policy)
    assert activation_policy(model) == NAMED_POLICIES[policy]


def test_gradient_checkpointing_that_comes_later_takes_the_place_of_a_policy():
    model, inputs = model_of(BERT, True, 0.1), BERT.training_inputs()
    plain = run(model, inputs, None)
    set_activation_policy(model, "fp8")
    model.activation_checkpointing_enable()
    assert activation_policy(model) is None
    found = run(model, inputs, None, set_policy=lambda model, policy: None)
    assert_same(found, plain)
    model.activation_checkpointing_disable()
    set_activation_policy(model, "rank")
    model.activation_checkpointing_disable()
    assert activation_policy(model) is None
    assert run(model, inputs, None, set_policy=lambda model, policy: None).saved_bytes == plain.saved_bytes


@pytest.mark.parametrize("policy", ["rank", "fp8"])
def test_layers_take_no_cache_while_they_train(policy):
    model, inputs = model_of(GPT2, True, 0.0, use_cache=True), GPT2.training_inputs()
    set_activation_policy(model, policy)
    found = model(**inputs)
    assert found.past_key_values is None or found.past_key_values.get_seq_length() == 0
    found.loss.backward()
    model.eval()
    with torch.no_grad():
        assert model(inputs["input_ids"], use_cache=True).past_key_values.get_seq_length() == 9
