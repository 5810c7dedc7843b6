"""hf_comera/hub/checkpoint.py: a save is all or nothing, and leaves files of others alone."""

import errno
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForMaskedLM, BertConfig

from hf_comera import ComeraConfig, add_rank_gates, get_comera_model
from hf_comera.hub import checkpoint
from hf_comera.hub.checkpoint import atomic_save
from tests.architectures import ARCHITECTURES


def test_a_failing_save_changes_nothing(tmp_path):
    (tmp_path / "model.safetensors").write_text("old")

    def save(folder):
        (folder / "model.safetensors").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        atomic_save(save, tmp_path, {})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"model.safetensors": "old"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_save_leaves_no_new_folder(error, tmp_path):
    def save(folder):
        (folder / "model.safetensors").write_text("half")
        raise error

    with pytest.raises(error):
        atomic_save(save, tmp_path / "new", {})
    assert not list(tmp_path.iterdir())


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


class KilledError(BaseException):
    """Ends a save at once, as a signal does that cannot be caught."""


def kill_at(step, folder, monkeypatch):
    """Have the process die when it is about to make its ``step``-th change to the names in ``folder``."""
    changes = iter(range(1000))

    def counted(change):
        def changed(*args, **kwargs):
            if any(Path(path).parent == folder for path in args) and next(changes) == step:
                raise KilledError
            return change(*args, **kwargs)

        return changed

    monkeypatch.setattr(checkpoint.os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(
        checkpoint.shutil, "rmtree", lambda *args, **kwargs: None
    )  # a killed process cleans nothing up


def tiny_model(seed, *, gated=False, **settings):
    torch.manual_seed(seed)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=61,
        max_position_embeddings=16,
    )  # fmt: skip
    model = get_comera_model(AutoModelForMaskedLM, ComeraConfig(**{"rank": 4, **settings}), config=config).eval()
    if gated:
        add_rank_gates(model)
        with torch.no_grad():
            for gate in [p for name, p in model.named_parameters() if "rank_gate" in name]:
                gate.mul_(0.5)
    return model


ONE, TWO, MANY = {}, {"max_shard_size": "12KB"}, {"max_shard_size": "4KB"}
PAIRS = {
    "one file over one": (ONE, {}, ONE, {}),
    "other ranks": (ONE, {}, ONE, {"rank": 2}),
    "one over shards": (MANY, {}, ONE, {}),
    "shards over one": (ONE, {}, MANY, {}),
    "shards over as many": (MANY, {}, MANY, {}),
    "shards over more": (MANY, {}, TWO, {}),
    "shards over fewer": (TWO, {}, MANY, {}),
    "gates over none": (ONE, {}, ONE, {"gated": True}),
    "none over gates": (ONE, {"gated": True}, ONE, {}),
    "other layers": (ONE, {}, ONE, {"exclude_modules": ["query"]}),
}


@pytest.mark.parametrize(("old_shards", "old", "new_shards", "new"), PAIRS.values(), ids=PAIRS.keys())
def test_a_save_that_is_killed_leaves_the_old_model_or_the_new_one_or_says_so(
    old_shards, old, new_shards, new, tmp_path, monkeypatch
):
    models = {"old": tiny_model(0, **old), "new": tiny_model(1, **new)}
    ids = torch.arange(2, 14).view(2, 6)
    with torch.no_grad():
        expected = {name: model(ids).logits for name, model in models.items()}
    models["old"].save_pretrained(tmp_path / "base", **old_shards)
    seen = []
    for step in range(100):
        folder = tmp_path / f"killed at {step}"
        shutil.copytree(tmp_path / "base", folder)
        with monkeypatch.context() as patch:
            kill_at(step, folder, patch)
            try:
                models["new"].save_pretrained(folder, **new_shards)
            except KilledError:
                pass
            else:
                break
        seen.append(loaded_as(folder, expected, ids))
        if seen[-1] == "refused":
            complete(folder)
            assert loaded_as(folder, expected, ids) == "new"
    assert seen[0] == "old"
    assert len(seen) >= 2
    assert loaded_as(folder, expected, ids) == "new"


def loaded_as(folder, expected, ids):
    """Which model the folder is loaded as; a refusal must say what to move."""
    try:
        model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    except ValueError as error:
        return "refused" if re.search("files of different saves.*move all files of", str(error)) else str(error)
    with torch.no_grad():
        logits = model(ids).logits
    (name,) = [name for name, wanted in expected.items() if torch.equal(logits, wanted)]
    return name


def complete(folder):
    """What the refusal says: move what is left into the folder, the config last."""
    (unfinished,) = folder.glob(f"{checkpoint.UNFINISHED}*")
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json"):
        path.rename(folder / path.name)


def test_new_files_are_on_the_disk_before_an_old_one_goes(tmp_path, monkeypatch):
    model = tiny_model(0)
    model.save_pretrained(tmp_path, **MANY)
    events = []
    sync, replace, unlink = checkpoint.sync, os.replace, Path.unlink
    monkeypatch.setattr(checkpoint, "sync", lambda path: (events.append(("sync", path.name)), sync(path)))
    monkeypatch.setattr(
        checkpoint.os, "replace", lambda *names: (events.append(("move", names[1].name)), replace(*names))
    )
    monkeypatch.setattr(Path, "unlink", lambda path: (events.append(("remove", path.name)), unlink(path)))
    model.save_pretrained(tmp_path)
    moved = [name for kind, name in events if kind == "move"]
    assert {"model.safetensors", "config.json"} <= set(moved)
    first_move = next(index for index, (kind, _) in enumerate(events) if kind == "move")
    assert {name for kind, name in events[:first_move] if kind == "sync"} == set(moved)
    removed = [index for index, (kind, _) in enumerate(events) if kind == "remove"]
    assert len(removed) > 2
    assert events.index(("move", "model.safetensors")) < removed[0]
    assert events[-1] == ("sync", tmp_path.name)


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_a_full_disk_is_told_in_a_sentence_and_leaves_nothing(error, tmp_path, monkeypatch):
    model = tiny_model(0)
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise error

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(
        OSError, match=r"could not be saved \(No space left on device\).*still whole.*Make room"
    ) as raised:
        model.save_pretrained(tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folders_of_saves_that_were_killed_long_ago_are_removed(tmp_path):
    for name, hours in (("killed", 3), ("running", 0)):
        folder = tmp_path / f"{checkpoint.UNFINISHED}{name}"
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
        moment = time.time() - 3600 * hours
        os.utime(folder, (moment, moment))
    tiny_model(0).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob(f"{checkpoint.UNFINISHED}*")] == [f"{checkpoint.UNFINISHED}running"]
