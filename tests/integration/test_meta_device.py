"""Compressed models on the meta device: shapes and operation counts without memory, for tools that size models."""

import copy

import pytest
import torch
from accelerate import init_empty_weights
from torch.utils.flop_counter import FlopCounterMode

from hf_comera import ComeraConfig, get_comera_model
from tests.architectures import ARCHITECTURES, every_architecture

PLACES = {
    "torch.device": lambda: torch.device("meta"),
    "init_empty_weights": init_empty_weights,
    "init_empty_weights with buffers": lambda: init_empty_weights(include_buffers=True),
}


def on_meta(inputs):
    return {name: tensor.to("meta") for name, tensor in inputs.items()}


def logits_of(model, inputs, *, trains):
    with torch.set_grad_enabled(trains):
        return model.train(trains)(**inputs).logits


@every_architecture
@pytest.mark.parametrize("trains", [True, False])
def test_logits_have_the_shape_and_dtype_of_the_dense_model(architecture, trains):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    inputs = on_meta(architecture.inputs())
    logits = logits_of(model.to("meta"), inputs, trains=trains)
    dense = logits_of(architecture.new_model().to("meta"), inputs, trains=trains)
    assert logits.is_meta
    assert (logits.shape, logits.dtype, logits.requires_grad) == (dense.shape, dense.dtype, trains)


@pytest.mark.parametrize("name", ["bert-mlm", "gpt2"])
@pytest.mark.parametrize("policy", [None, "rank"])
def test_a_step_counts_the_operations_that_it_has_with_values(name, policy):
    """At a rank that is not rounded up: layers without values build their halves one by one, and pad them later."""
    architecture, counts = ARCHITECTURES[name], []
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=8), config=architecture.new_config())
    inputs = architecture.training_inputs()
    for device in ("cpu", "meta"):
        moved = copy.deepcopy(model).to(device)
        moved.set_activation_policy(policy)
        with FlopCounterMode(display=False) as counter:
            moved(**{key: tensor.to(device) for key, tensor in inputs.items()}).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] > 0
    # a layer that is recomputed builds its halves again where none can be kept
    assert counts[0] == counts[1] if policy is None else counts[0] < counts[1]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@every_architecture
def test_a_model_that_is_built_there_has_no_memory_where_the_dense_one_has_none(architecture, place):
    with place():
        model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
        dense = architecture.auto_class.from_config(architecture.new_config())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {name: buffer.is_meta for name, buffer in model.named_buffers()} == {
        name: buffer.is_meta for name, buffer in dense.named_buffers()
    }
    model.to("meta")(**on_meta(architecture.training_inputs())).loss.backward()


def test_a_model_that_is_built_there_takes_on_a_state():
    architecture = ARCHITECTURES["bert-mlm"]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    with init_empty_weights():
        empty = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    empty.load_state_dict(model.state_dict(), assign=True)
    inputs = architecture.inputs()
    torch.testing.assert_close(empty.eval()(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)


def test_the_default_device_of_torch_is_kept_by_a_new_model():
    """Of parameters that are given memory late no less than of those that have it at once."""
    architecture = ARCHITECTURES["bert-mlm"]
    with torch.device("meta"), torch.device("cpu"):
        model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
