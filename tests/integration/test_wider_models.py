"""Architectures beyond the table of default targets: each agrees with a dense one, and comes back from a file."""

import copy

import pytest
import torch

import hf_comera
from hf_comera import ComeraConfig, get_comera_model
from tests.integration.wider_models import MODELS

FULL_RANK = 10_000
OUTPUTS = ("logits", "last_hidden_state", "logits_per_image", "prediction_logits")
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def run(model, inputs):
    """The first of the model's outputs that is meant to be read, with the same random numbers at each call."""
    torch.manual_seed(0)
    found = model(**inputs, return_dict=True)
    return next(found[name] for name in OUTPUTS if found.get(name) is not None)


def assert_agrees(actual, expected, dtype, exact=1e-8):
    """Equal up to rounding, against the largest entry."""
    tolerance = exact if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max().item())


def assert_gradients_agree(compressed, twin, dtype):
    """What both train has one gradient, and if all of the twin is trained, all cores are."""
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    trained = {name: grad for name, grad in expected.items() if grad is not None}
    largest = max(grad.abs().max().item() for grad in trained.values())
    shared = [(name, parameter) for name, parameter in compressed.named_parameters() if name in trained]
    assert shared
    for name, parameter in shared:
        tolerance = largest * (1e-9 if dtype == torch.float64 else 1e-4)
        torch.testing.assert_close(
            parameter.grad, trained[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    if len(trained) == len(expected):
        assert all(parameter.grad is not None for parameter in compressed.parameters())


@every_model
def test_from_scratch_agrees_with_its_dense_twin(model):
    dense_count = sum(parameter.numel() for parameter in model.new_dense().parameters())
    compressed = (
        get_comera_model(model.model_class, ComeraConfig(rank=6), config=model.config()).to(model.dtype).eval()
    )
    assert hf_comera.size_report(compressed).dense_parameters == dense_count
    twin = copy.deepcopy(compressed).merge_and_unload()
    assert type(twin) is model.model_class
    outputs, expected = run(compressed, model.inputs()), run(twin, model.inputs())
    assert_agrees(outputs, expected, model.dtype)
    with torch.no_grad():
        assert_agrees(run(compressed, model.inputs()), expected, model.dtype)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        model.dtype
    )
    (outputs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_gradients_agree(compressed, twin, model.dtype)


@every_model
def test_comes_back_from_its_checkpoint(model, tmp_path):
    compressed = (
        get_comera_model(model.model_class, ComeraConfig(rank=6), config=model.config()).to(model.dtype).eval()
    )
    compressed.save_pretrained(tmp_path)
    loaded, found = model.model_class.from_pretrained(tmp_path, dtype=model.dtype, output_loading_info=True)
    assert not any(found.values())
    with torch.no_grad():
        assert_agrees(run(loaded.eval(), model.inputs()), run(compressed, model.inputs()), model.dtype, exact=1e-12)


@every_model
def test_a_dense_model_at_full_rank_keeps_its_outputs(model, tmp_path):
    dense = model.new_dense()
    dense.save_pretrained(tmp_path)
    expected = run(dense, model.inputs())
    live = get_comera_model(dense, ComeraConfig(rank=FULL_RANK))
    loaded = model.model_class.from_pretrained(
        tmp_path, dtype=model.dtype, quantization_config=ComeraConfig(rank=FULL_RANK)
    ).eval()
    assert set(loaded.state_dict()) == set(live.state_dict())
    with torch.no_grad():
        assert_agrees(run(live, model.inputs()), expected, model.dtype)
        assert_agrees(run(loaded, model.inputs()), expected, model.dtype)
