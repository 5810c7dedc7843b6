"""hf_comera/hub/saving.py: a save is all or nothing, and leaves files of others alone."""

import pytest

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.hub.saving import atomic_save
from tests.architectures import ARCHITECTURES


def test_a_failing_save_changes_nothing(tmp_path):
    (tmp_path / "model.safetensors").write_text("old")

    def save(folder):
        (folder / "model.safetensors").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        atomic_save(save, tmp_path, {})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"model.safetensors": "old"}


def test_stale_shards_go_and_other_files_stay(tmp_path):
    model = get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=4))
    (tmp_path / "tokenizer.json").write_text("mine")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"tokenizer.json", "model.safetensors", "config.json", "generation_config.json"}
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    model = get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=4))
    with pytest.raises(ValueError, match=r"taken' is a file; give a folder"):
        model.save_pretrained(tmp_path / "taken")


def test_other_processes_of_a_distributed_run_write_nothing(tmp_path):
    model = get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=4))
    model.save_pretrained(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    model.save_pretrained(tmp_path, is_main_process=False)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert after["model.safetensors"] == before["model.safetensors"]
    assert set(after) == set(before)


def test_weights_of_other_variants_and_of_others_stay(tmp_path):
    model = get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=4))
    (tmp_path / "model_ema.safetensors").write_text("mine")
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    model.save_pretrained(tmp_path, variant="fp16")
    names = {path.name for path in tmp_path.iterdir() if "safetensors" in path.name}
    assert names == {"model.safetensors", "model.fp16.safetensors", "model_ema.safetensors"}
