"""hf_comera/compress/surgery.py: layers are swapped and restored with ties, dtype and bias; errors change nothing."""

import copy

import pytest
import torch
from torch import nn

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.compress.plan import plan
from hf_comera.compress.surgery import decompose_model, merge_model
from hf_comera.modules import TensorTrainModule, TiedEmbedding, TiedHead
from tests.architectures import ARCHITECTURES, every_architecture


@every_architecture
def test_at_full_rank_the_model_computes_the_same(architecture):
    model = architecture.new_model()
    inputs = architecture.inputs()
    expected = model(**inputs).logits
    errors = decompose_model(model, plan(model, ComeraConfig(rank=10_000)))
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    assert max(found["error"] for found in errors.values()) < 1e-5
    assert sum(isinstance(m, TensorTrainModule) for m in model.modules()) == architecture.num_layers
    assert sum(isinstance(m, TiedHead | TiedEmbedding) for m in model.modules()) == architecture.num_tied


@every_architecture
def test_merging_restores_types_ties_and_function(architecture):
    original = architecture.new_model()
    model = copy.deepcopy(original)
    inputs = architecture.inputs()
    decompose_model(model, plan(model, ComeraConfig(rank=4)))
    expected = model(**inputs).logits
    merge_model(model)
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    types = {name: type(module) for name, module in original.named_modules()}
    assert {name: type(module) for name, module in model.named_modules()} == types
    assert model.all_tied_weights_keys == original.all_tied_weights_keys
    assert {name: p.shape for name, p in model.named_parameters()} == {
        n: p.shape for n, p in original.named_parameters()
    }


def test_errors_are_the_relative_frobenius_errors():
    model = ARCHITECTURES["bert-classifier"].new_model()
    dense = copy.deepcopy(model)
    errors = decompose_model(model, plan(model, ComeraConfig(rank=4)))
    for name, error in errors.items():
        weight = dense.get_submodule(name).weight
        expected = ((model.get_submodule(name).dense() - weight).norm() / weight.norm()).item()
        assert error == {"error": pytest.approx(expected, rel=1e-4)}
        assert 0 < error["error"] < 1


def test_bias_object_dtype_mode_and_frozen_state_are_carried_over():
    model = ARCHITECTURES["bert-classifier"].new_model().to(torch.bfloat16).train()
    name = "bert.encoder.layer.0.attention.self.query"
    dense = model.get_submodule(name)
    dense.weight.requires_grad_(False)
    bias = dense.bias
    decompose_model(model, plan(model, ComeraConfig(rank=4)))
    layer = model.get_submodule(name)
    assert layer.bias is bias
    assert layer.training
    assert all(core.dtype == torch.bfloat16 and not core.requires_grad for core in layer.cores())


def test_a_weight_that_cannot_be_decomposed_leaves_the_model_as_it_was():
    model = ARCHITECTURES["bert-classifier"].new_model()
    model.bert.encoder.layer[1].output.dense.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layer\.1\.output\.dense' holds NaN or infinity"):
        get_comera_model(model, ComeraConfig(rank=4))
    assert type(model.bert.encoder.layer[0].attention.self.query) is nn.Linear
    assert not any(isinstance(m, TensorTrainModule) for m in model.modules())
