"""hf_comera/hub/source.py: a model is found by folder, config or name, and a misspelt one is told the next."""

import json

import pytest
import torch
from transformers import AutoConfig

from hf_comera import ComeraConfig, get_comera_model, rank_report
from hf_comera.hub.source import find_model
from tests.architectures import ARCHITECTURES, every_architecture


@every_architecture
def test_skeletons_have_the_parameters_of_the_models(architecture, tmp_path):
    dense = architecture.new_model()
    shapes = {name: parameter.shape for name, parameter in dense.named_parameters()}
    dense.save_pretrained(tmp_path / "dense")
    compressed = get_comera_model(dense, ComeraConfig(rank=4))
    compressed.save_pretrained(tmp_path / "compressed")
    source = find_model(str(tmp_path / "dense"))
    skeleton = source.dense_skeleton()
    assert {name: parameter.shape for name, parameter in skeleton.named_parameters()} == shapes
    assert type(skeleton) is source.model_class
    for found in (
        source.compressed_skeleton(ComeraConfig(rank=4)),
        find_model(str(tmp_path / "compressed")).compressed_skeleton(),
    ):
        assert all(parameter.is_meta for parameter in found.parameters())
        assert {name: parameter.shape for name, parameter in found.named_parameters()} == {
            name: parameter.shape for name, parameter in compressed.named_parameters()
        }
        assert found.comera_plan().parameters == compressed.comera_plan().parameters


def test_a_skeleton_has_the_ranks_of_the_file(tmp_path):
    model = get_comera_model(ARCHITECTURES["bert-mlm"].new_model(), ComeraConfig(rank_pattern={"query": 3}, rank=5))
    model.save_pretrained(tmp_path)
    assert rank_report(find_model(str(tmp_path)).compressed_skeleton()).after == rank_report(model).after


def test_settings_are_for_dense_models_only(tmp_path):
    dense = ARCHITECTURES["gpt2"].new_model()
    dense.save_pretrained(tmp_path / "dense")
    get_comera_model(dense, ComeraConfig(rank=4)).save_pretrained(tmp_path / "compressed")
    with pytest.raises(ValueError, match=r"is dense, so it needs settings, for example ComeraConfig\(rank=30\)"):
        find_model(str(tmp_path / "dense")).compressed_skeleton()
    with pytest.raises(ValueError, match=r"is compressed, with the layers and ranks that its config\.json records"):
        find_model(str(tmp_path / "compressed")).compressed_skeleton(ComeraConfig(rank=4))


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("bert-mlm", "BertForMaskedLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
    ],
)
def test_a_config_that_names_no_class_gets_the_usual_one(name, class_name, tmp_path):
    ARCHITECTURES[name].new_config().save_pretrained(tmp_path)
    assert type(find_model(str(tmp_path / "config.json")).dense_skeleton()).__name__ == class_name
    assert type(find_model(str(tmp_path), "AutoModel").dense_skeleton()).__name__.endswith("Model")


def test_saving_and_loading_with_the_tokenizer(tmp_path):
    model = ARCHITECTURES["bert-mlm"].new_model()
    model.save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    (tmp_path / "dense" / "optimizer.pt").write_text("large")
    source = find_model(str(tmp_path / "dense"))
    source.save(source.load(), tmp_path / "out")
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    ids = torch.arange(9)[None]
    torch.testing.assert_close(find_model(str(tmp_path / "out")).load()(ids).logits, model(ids).logits)


def test_a_quantized_model_is_refused(tmp_path):
    config = ARCHITECTURES["gpt2"].new_config()
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="is quantized by 'gptq'"):
        _ = find_model(str(tmp_path)).settings


@pytest.fixture
def models(tmp_path, monkeypatch):
    """``runs/tiny-bert`` in an empty folder, where the process is."""
    monkeypatch.chdir(tmp_path)
    ARCHITECTURES["bert-mlm"].new_config().save_pretrained("runs/tiny-bert")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("runs/tiny-brt", r"'runs/tiny-brt' is no folder .* Did you mean 'runs/tiny-bert'\?"),
        ("./runs/tiny-brt", r"There is no folder and no file './runs/tiny-brt'\. Did you mean 'runs/tiny-bert'\?"),
        ("a/b/c/d", r"There is no folder and no file 'a/b/c/d'\. Give a folder with a config\.json"),
        ("runs", r"'runs' holds no config\.json\. Did you mean 'runs/tiny-bert'\?"),
        ("empty", r"'empty' holds no config\.json, nothing\. Give a folder"),
        ("notes", r"'notes' holds no config\.json, only a\.txt\. Give a folder"),
        ("notes/a.txt", r"a\.txt is no config of a model: it cannot be read as JSON"),
        ("no-such-model", r"'no-such-model' is no folder of this machine, and the Hub did not give .* Give a folder"),
    ],
)
def test_a_model_that_is_not_there(given, message, models):
    with pytest.raises(ValueError, match=message):
        find_model(given)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "brt"}, r"model_type='brt', which Transformers does not know\. Did you mean '.*bert'"),
        ({"hidden_size": 3}, r"model_type=None, which Transformers does not know"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedML"]},
            r"its config names the class 'BertForMaskedML', but .* Did you mean 'BertForMaskedLM'",
        ),
    ],
    ids=["misspelt type", "no type", "misspelt class"],
)
def test_a_config_that_cannot_be_used(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        find_model(str(tmp_path))


def test_a_cached_name_is_a_near_miss(tmp_path, monkeypatch):
    from huggingface_hub import constants

    (tmp_path / "models--me--tiny-bert").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="Did you mean 'me/tiny-bert'"):
        find_model("me/tiny-brt")


def test_the_config_that_was_found_is_left_as_it_is(tmp_path):
    ARCHITECTURES["bert-mlm"].new_config().save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    source.compressed_skeleton(ComeraConfig(rank=4))
    assert source.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
