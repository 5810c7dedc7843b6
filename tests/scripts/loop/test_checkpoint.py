"""scripts/loop/checkpoint.py: checkpoints are whole, only the newest stay, and only the same run may read them."""

import errno
import logging
import os
import shutil
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from transformers import get_scheduler

from hf_comera.training.whole_checkpoint import MANIFEST, UNFINISHED, checkpoints, writing
from loop.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    prepare_folder,
    read_history,
    run_identity,
    save_checkpoint,
)
from tests.training.disk_faults import DAMAGES, Killed, killed_at

IDENTITY = {"seed": 1, "rank": 16}


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


def save(accelerator, folder, step, keep=2, stateful=None):
    return save_checkpoint(
        accelerator, folder, step, identity=IDENTITY, history={"losses": [0.1 + 0.2] * step}, keep=keep,
        stateful=stateful or {},
    )  # fmt: skip


def command(checkpoint):
    return f"launch --resume_from_checkpoint {checkpoint}"


def find(wanted, folder):
    return find_checkpoint(wanted, folder, command)


def files(checkpoint):
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def test_newest_are_kept_in_order_of_steps(accelerator, tmp_path):
    for step in (2, 9, 10):
        save(accelerator, tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert find("latest", tmp_path) == tmp_path / "checkpoint-10"
    assert find(str(tmp_path / "checkpoint-9"), tmp_path) == tmp_path / "checkpoint-9"


def test_history_comes_back_exactly(accelerator, tmp_path):
    path = save(accelerator, tmp_path, 3)
    assert read_history(path, IDENTITY) == {"losses": [0.1 + 0.2] * 3}


def test_broken_off_write_leaves_no_checkpoint(accelerator, tmp_path, monkeypatch):
    save(accelerator, tmp_path, 1)

    def fail(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(accelerator, "save_state", fail)
    with pytest.raises(OSError, match=r"could not be written \(No space left.*make room.*resume from checkpoint-1"):
        save(accelerator, tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_folder_removed_meanwhile_is_made_again(accelerator, tmp_path):
    save(accelerator, tmp_path / "out", 1)
    shutil.rmtree(tmp_path / "out")
    newest = save(accelerator, tmp_path / "out", 2)
    assert find("latest", tmp_path / "out") == newest


def test_killed_at_any_step_of_a_save_a_whole_checkpoint_is_there(accelerator, tmp_path):
    save(accelerator, tmp_path / "counted", 1, keep=1)
    with killed_at(1000) as steps:
        save(accelerator, tmp_path / "counted", 2, keep=1)
    assert steps[0] > 15
    for number in range(1, steps[0] + 1):
        folder = tmp_path / str(number)
        before = save(accelerator, folder, 1)
        with killed_at(number), pytest.raises(Killed):
            save(accelerator, folder, 2, keep=1)
        found = find("latest", folder)
        assert found in (before, folder / "checkpoint-2")
        load_checkpoint(accelerator, found, {})
        save(accelerator, folder, 3, keep=1)
        assert [path.name for path in folder.iterdir()] == ["checkpoint-3"]


@pytest.fixture
def two_checkpoints(accelerator, tmp_path):
    """A folder with two checkpoints that differ in every file but the settings."""
    scheduler = get_scheduler("linear", accelerator._optimizers[0], 2, 8)
    for step in (1, 2):
        accelerator._models[0](torch.ones(2)).sum().backward()
        accelerator._optimizers[0].step()
        scheduler.step()
        torch.rand(1)
        save(accelerator, tmp_path / "out", step, stateful={"schedule": scheduler})
    return tmp_path / "out"


FILES = [
    MANIFEST, "history.json", "model.safetensors", "optimizer.bin", "random_states_0.json",
    "run_settings.json", "states.json",
]  # fmt: skip


def test_a_checkpoint_holds_no_pickle_but_that_of_the_optimizer(two_checkpoints):
    assert files(two_checkpoints / "checkpoint-2") == FILES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", DAMAGES)
def test_a_damaged_file_is_named_and_the_one_before_taken(name, harm, two_checkpoints, caplog):
    before, newest = two_checkpoints / "checkpoint-1", two_checkpoints / "checkpoint-2"
    harm(newest / name, before)
    with pytest.raises(ValueError, match="The newest whole one before it") as caught:
        find(str(newest), two_checkpoints)
    told = newest if name == MANIFEST and harm.__name__ == "foreign" else newest / name
    assert str(told) in str(caught.value)
    assert command(before) in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert find("latest", two_checkpoints) == before
    assert str(told) in caplog.text
    harm(before / name, newest)
    with pytest.raises(ValueError, match="None before it is whole"):
        find(str(newest), two_checkpoints)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole.*checkpoint-2.*checkpoint-1.*--overwrite"):
        find("latest", two_checkpoints)


def test_states_come_back(accelerator, tmp_path):
    scheduler = get_scheduler("cosine", accelerator._optimizers[0], 2, 8)
    accelerator._optimizers[0].step()
    scheduler.step()
    path = save(accelerator, tmp_path, 3, stateful={"schedule": scheduler})
    expected = torch.rand(3)
    fresh = get_scheduler("cosine", accelerator._optimizers[0], 2, 8)
    load_checkpoint(accelerator, path, {"schedule": fresh})
    assert fresh.state_dict() == scheduler.state_dict()
    assert torch.equal(torch.rand(3), expected)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"])
def test_nothing_that_a_checkpoint_holds_is_run(name, accelerator, tmp_path):
    path, marker = save(accelerator, tmp_path, 1), tmp_path / "it ran"
    with writing(tmp_path / "checkpoint-2") as evil:  # listed as if it had been written so
        shutil.copytree(path, evil, dirs_exist_ok=True)
        torch.save(Evil(marker), evil / name)
    refused = {"optimizer.bin": "could run code", "custom_checkpoint_0.pkl": "custom checkpoints in folder"}
    raises = pytest.raises((ValueError, RuntimeError), match=refused[name]) if name in refused else nullcontext()
    with raises:
        load_checkpoint(accelerator, find("latest", tmp_path), {})
    assert not marker.exists()


def test_checkpoints_of_earlier_versions_and_of_others_are_refused(accelerator, tmp_path):
    path = save(accelerator, tmp_path, 1)
    (path / MANIFEST).unlink()
    with pytest.raises(ValueError, match="an earlier version of this script"):
        find(str(path), tmp_path)
    with writing(tmp_path / "checkpoint-2") as other:
        (other / "trainer_state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has no history.json: it was not written by this script"):
        find(str(tmp_path / "checkpoint-2"), tmp_path)


def test_other_settings_are_named(accelerator, tmp_path):
    path = save(accelerator, tmp_path, 1)
    with pytest.raises(ValueError, match="rank was 16, is 8"):
        read_history(path, {**IDENTITY, "rank": 8})


def test_settings_that_change_no_number_are_free():
    settings = {"output_dir": "a", "seed": 1, "learning_rate": 0.1, "num_threads": 2}
    assert run_identity(settings, {"total_steps": 5}) == {"seed": 1, "learning_rate": 0.1, "total_steps": 5}


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint"):
        find("latest", tmp_path)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        find(str(tmp_path / "elsewhere"), tmp_path)


def test_folder_of_an_earlier_run_is_not_overwritten_unasked(accelerator, tmp_path):
    save(accelerator, tmp_path, 1)
    with pytest.raises(ValueError, match=r"checkpoint-1.*--resume_from_checkpoint latest.*--overwrite_output_dir"):
        prepare_folder(tmp_path, overwrite=False)
    (tmp_path / UNFINISHED).mkdir()
    prepare_folder(tmp_path, overwrite=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_output_that_is_a_file_is_refused(name, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"--output_dir .*file.* cannot be made"):
        prepare_folder(tmp_path / name, overwrite=True)
