"""scripts/run_checkpoint.py: checkpoints are whole, only the newest stay, and only the same run may read them."""

import pytest
import torch
from accelerate import Accelerator

from run_checkpoint import checkpoints, find_checkpoint, prepare_folder, read_history, run_identity, save_checkpoint

IDENTITY = {"seed": 1, "rank": 16}


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


def save(accelerator, folder, step, keep=2):
    return save_checkpoint(
        accelerator, folder, step, identity=IDENTITY, history={"losses": [0.1 + 0.2] * step}, keep=keep
    )


def test_newest_are_kept_in_order_of_steps(accelerator, tmp_path):
    for step in (2, 9, 10):
        save(accelerator, tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoint-10"
    assert find_checkpoint(str(tmp_path / "checkpoint-9"), tmp_path) == tmp_path / "checkpoint-9"


def test_history_comes_back_exactly(accelerator, tmp_path):
    path = save(accelerator, tmp_path, 3)
    assert read_history(path, IDENTITY) == {"losses": [0.1 + 0.2] * 3}


def test_broken_off_write_leaves_no_checkpoint(accelerator, tmp_path, monkeypatch):
    save(accelerator, tmp_path, 1)

    def fail(folder):
        (tmp_path / "checkpoint-2.unfinished").mkdir()
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(accelerator, "save_state", fail)
        with pytest.raises(OSError, match="disk full"):
            save(accelerator, tmp_path, 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]
    save(accelerator, tmp_path, 3)
    assert not list(tmp_path.glob("*.unfinished"))


def test_other_settings_are_named(accelerator, tmp_path):
    path = save(accelerator, tmp_path, 1)
    with pytest.raises(ValueError, match="rank was 16, is 8"):
        read_history(path, {**IDENTITY, "rank": 8})


def test_settings_that_change_no_number_are_free():
    settings = {"output_dir": "a", "seed": 1, "learning_rate": 0.1, "num_threads": 2}
    assert run_identity(settings, {"total_steps": 5}) == {"seed": 1, "learning_rate": 0.1, "total_steps": 5}


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint"):
        find_checkpoint("latest", tmp_path)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        find_checkpoint(str(tmp_path / "elsewhere"), tmp_path)


def test_folder_of_an_earlier_run_is_not_overwritten_unasked(accelerator, tmp_path):
    save(accelerator, tmp_path, 1)
    with pytest.raises(ValueError, match=r"checkpoint-1.*--resume_from_checkpoint latest.*--overwrite_output_dir"):
        prepare_folder(tmp_path, overwrite=False)
    prepare_folder(tmp_path, overwrite=True)
    assert not checkpoints(tmp_path)
