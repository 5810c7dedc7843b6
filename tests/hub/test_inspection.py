"""hf_comera/hub/inspection.py: the report is that of the loaded model, and files that do not fit are refused."""

import shutil

import pytest

from hf_comera import ComeraConfig, add_rank_gates, get_comera_model, inspect_checkpoint, write_model_card
from tests.architectures import ARCHITECTURES, every_architecture


@every_architecture
def test_reports_what_the_model_does(architecture, tmp_path):
    model = get_comera_model(architecture.new_model(), ComeraConfig(rank=4))
    model.save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.plan.layers == model.comera_plan().layers
    assert (found.plan.parameters, len(found.plan.ties)) == (model.comera_plan().parameters, architecture.num_tied)
    assert found.ranks().after == model.rank_report().after
    assert found.bytes == (tmp_path / "model.safetensors").stat().st_size
    assert (found.model_class, found.dtypes) == (type(model).__name__, ("F32",))
    assert not found.has_rank_gates


def test_shards_gates_and_the_card_are_read(tmp_path):
    model = get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=4, target_modules=["c_attn"]))
    add_rank_gates(model)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    write_model_card(model, tmp_path, base_model="openai-community/gpt2", license="mit")
    found = inspect_checkpoint(tmp_path)
    assert found.has_rank_gates
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    expected = {"base_model": "openai-community/gpt2", "license": "mit", "rank": 4, "target_modules": ["c_attn"]}
    assert expected.items() <= found.provenance.items()
    assert found.provenance["save_id"] == model.config.quantization_config.save_id


@pytest.fixture
def saved(tmp_path):
    dense = ARCHITECTURES["gpt2"].new_model()
    dense.save_pretrained(tmp_path / "dense")
    for name in ("one", "two"):
        get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=4)).save_pretrained(tmp_path / name)
    return tmp_path


def test_files_of_two_saves_are_refused(saved):
    shutil.copy(saved / "one" / "config.json", saved / "two")
    with pytest.raises(ValueError, match="holds files of different saves"):
        inspect_checkpoint(saved / "two")


def test_missing_weights_are_named(saved):
    (saved / "one" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors\. .* copy the whole folder again"):
        inspect_checkpoint(saved / "one")


@pytest.mark.parametrize(("name", "kind"), [("dense", "dense"), ("one/config.json", "a file")])
def test_what_is_no_compressed_folder_is_refused(name, kind, saved):
    with pytest.raises(ValueError, match=f"is {kind}, and the folder of a compressed checkpoint is needed"):
        inspect_checkpoint(saved / name)


def test_storage_is_told(tmp_path):
    storage = {"wte": "int4", "*": "int8"}
    model = get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=8, storage=storage))
    model.save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.provenance["storage"] == storage
    assert (found.provenance["format_version"], found.dtypes) == (5, ("F32", "I8", "U8"))
    assert found.bytes == (tmp_path / "model.safetensors").stat().st_size
