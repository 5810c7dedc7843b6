"""hf_comera/hub/build.py: a trained model decomposed by its calibration computes nearer, is saved and loaded alike."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_comera import ComeraConfig, calibrate, get_comera_model
from tests.architectures import ARCHITECTURES

ARCHITECTURE = ARCHITECTURES["bert-classifier"]


@pytest.fixture(scope="module")
def trained():
    """A model with biases, batches of skewed tokens, and its calibration."""
    torch.manual_seed(0)
    model = ARCHITECTURE.new_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    batches = [{"input_ids": (torch.rand(8, 12).square() * 239).long() + 2} for _ in range(4)]
    return model, batches, calibrate(model, batches)


def output_error(model, dense, batches):
    with torch.no_grad():
        states = [torch.cat([m.bert(**batch).last_hidden_state for batch in batches]) for m in (model, dense)]
    return ((states[0] - states[1]).norm() / states[1].norm()).item()


@pytest.mark.parametrize("settings", [{"rank": 8}, {"rank": 8, "num_factors": 1}, {"rank": 8, "embedding_width": 8}])
def test_outputs_are_nearer_than_those_of_the_plain_decomposition(trained, settings):
    dense, batches, calibration = trained
    plain = get_comera_model(copy.deepcopy(dense), ComeraConfig(**settings))
    found = get_comera_model(copy.deepcopy(dense), ComeraConfig(**settings), calibration=calibration)
    assert output_error(found, dense, batches) < output_error(plain, dense, batches)
    entries = found.comera_plan().layers
    weighted = [x for x in entries if x.kind != "ttm_embedding"]
    assert all(x.output_error is not None and x.error >= 0 for x in weighted)
    assert "outputs' error" in str(found.comera_plan())
    assert [x.ranks for x in entries] == [x.ranks for x in plain.comera_plan().layers]


def test_a_wanted_size_is_met(trained):
    dense, batches, calibration = trained
    size = sum(parameter.numel() for parameter in dense.parameters())
    errors = []
    for ratio in (0.8, 0.5, 0.4):
        model = get_comera_model(copy.deepcopy(dense), ComeraConfig(target_ratio=ratio), calibration=calibration)
        assert 0.97 * ratio * size < sum(parameter.numel() for parameter in model.parameters()) <= ratio * size
        errors.append(output_error(model, dense, batches))
    assert errors == sorted(errors)


@pytest.mark.parametrize("settings", [{"target_ratio": 0.5}, {"rank": 8}])
def test_loading_decomposes_alike_and_a_saved_model_is_the_same(trained, tmp_path, settings):
    dense, batches, calibration = trained
    dense.save_pretrained(tmp_path / "dense")
    calibration.save(tmp_path / "statistics")
    live = get_comera_model(copy.deepcopy(dense), ComeraConfig(**settings), calibration=calibration)
    config = ComeraConfig(**settings, calibration=str(tmp_path / "statistics"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "dense", quantization_config=config)
    states = live.state_dict()
    assert loaded.state_dict().keys() == states.keys()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, states[name])
    loaded.save_pretrained(tmp_path / "compressed")
    written = json.loads((tmp_path / "compressed" / "config.json").read_text())
    assert "calibration" not in written["quantization_config"]
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "compressed")
    with torch.no_grad():
        assert torch.equal(again(**batches[0]).logits, loaded.eval()(**batches[0]).logits)
    recorded = again.comera_plan().layers
    assert [x.output_error for x in recorded] == [x.output_error for x in loaded.comera_plan().layers]


def test_the_mean_of_the_outputs_is_exact_where_there_is_a_bias(trained):
    dense, _, calibration = trained
    model = get_comera_model(copy.deepcopy(dense), ComeraConfig(rank=2), calibration=calibration)
    name = "bert.encoder.layer.0.attention.self.query"
    mean = calibration.inputs[name].mean.float()
    with torch.no_grad():
        expected = dense.get_submodule(name)(mean)
        torch.testing.assert_close(model.get_submodule(name)(mean), expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(model.get_submodule(name).bias, dense.get_submodule(name).bias)


def test_a_layer_with_too_few_inputs_is_decomposed_as_without_them_and_says_so(caplog):
    dense = ARCHITECTURE.new_model()
    calibration = calibrate(dense, [ARCHITECTURE.inputs()])
    plain = get_comera_model(copy.deepcopy(dense), ComeraConfig(rank=4, exclude_modules=["word_embeddings"]))
    found = get_comera_model(
        copy.deepcopy(dense), ComeraConfig(rank=4, exclude_modules=["word_embeddings"]), calibration=calibration
    )
    for one, other in zip(found.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "12 layers saw fewer inputs than an input has numbers, for example bert.encoder.layer.0" in caplog.text


def test_what_does_not_fit_is_refused_and_changes_nothing(trained):
    dense, _, calibration = trained
    model = copy.deepcopy(dense)
    with pytest.raises(ValueError, match=r"target_ratio=0\.5 of ComeraConfig needs a trained model and calibration="):
        get_comera_model(model, ComeraConfig(target_ratio=0.5))
    with pytest.raises(ValueError, match="a new model has none"):
        get_comera_model(
            ARCHITECTURE.auto_class, ComeraConfig(), config=ARCHITECTURE.new_config(), calibration=calibration
        )
    with pytest.raises(ValueError, match=r"target_parameters=9000 of ComeraConfig needs"):
        get_comera_model(
            ARCHITECTURE.auto_class, ComeraConfig(target_parameters=9000), config=ARCHITECTURE.new_config()
        )
    other = ARCHITECTURES["gpt2"].new_model()
    with pytest.raises(ValueError, match="It was made with another BertForSequenceClassification"):
        get_comera_model(other, ComeraConfig(rank=4), calibration=calibration)
    assert type(model) is type(dense)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), dense.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_ratio": 1.5}, r"target_ratio=1\.5 is needed as the part"),
        ({"target_ratio": True}, "target_ratio=True is needed as the part"),
        ({"target_parameters": 0}, "target_parameters=0 is not a positive integer"),
        ({"target_ratio": 0.5, "target_parameters": 9}, "both name a size"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ComeraConfig(**settings)
