"""hf_comera/training/trainer.py: checkpoints of a Trainer are whole, the newest whole one is resumed."""

import errno
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_comera import ComeraTrainer
from hf_comera.training import whole_checkpoint
from hf_comera.training.trainer import checkpoint_to_resume
from hf_comera.training.whole_checkpoint import MANIFEST, UNFINISHED, checkpoints, damage
from tests.training.disk_faults import DAMAGES, Killed, killed_at
from tests.training.trainer_runs import arguments


class Tiny(nn.Module):
    """Enough of a model for a Trainer, with dropout, so that random numbers count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(self.dropout(x)), labels)}


def examples():
    torch.manual_seed(1)
    return [{"x": torch.randn(4), "labels": torch.tensor(index % 2)} for index in range(16)]


def make(folder, trainer_class=ComeraTrainer, callbacks=None, **settings):
    model, data = Tiny(), examples()
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    return trainer_class(
        model=model, args=arguments(folder, **{**defaults, **settings}), train_dataset=data, eval_dataset=data,
        optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-2), None), callbacks=callbacks,
    )  # fmt: skip


def train(folder, resume=None, **settings):
    trainer = make(folder, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer):
    return trainer.model.layer.weight.detach().clone()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A whole training: its folder with checkpoints of steps 2, 4 and 6, and the weights at the end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, weights(train(folder))


@pytest.fixture
def folder(reference, tmp_path):
    """With checkpoints of steps 2 and 4."""
    shutil.copytree(reference[0], tmp_path / "out", ignore=lambda _, names: {"checkpoint-6"} & set(names))
    return tmp_path / "out"


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", MANIFEST]


def test_checkpoints_are_whole(reference):
    found = checkpoints(reference[0])
    assert [path.name for path in found] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert all(damage(path) is None for path in found)
    assert {path.name for path in found[0].iterdir()} == {*FILES, "training_args.bin"}
    assert not (reference[0] / UNFINISHED).exists()


@pytest.mark.parametrize("name", [*FILES, "training_args.bin"])
@pytest.mark.parametrize("harm", DAMAGES)
def test_a_damaged_file_is_named_and_the_one_before_taken(name, harm, folder, caplog):
    before, newest = folder / "checkpoint-2", folder / "checkpoint-4"
    harm(newest / name, before)
    trainer = make(folder)
    if name == MANIFEST and harm.__name__ == "gone":  # as another Trainer would have written it
        assert checkpoint_to_resume(trainer, True) == str(newest)
        return
    told = newest if name == MANIFEST else newest / name
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=.*The newest whole one before it: ") as caught:
        trainer.train(resume_from_checkpoint=str(newest))
    assert str(told) in str(caught.value)
    assert f"resume_from_checkpoint={str(before)!r}" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(trainer, True) == str(before)
    assert str(told) in caplog.text
    harm(before / name, newest)
    with pytest.raises(ValueError, match=r"None before it is whole"):
        trainer.train(resume_from_checkpoint=newest)
    with pytest.raises(ValueError, match=r"checkpoint-4.*checkpoint-2.*Start from step 0"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("resume", [True, "checkpoint-4"])
def test_resuming_goes_on_exactly(resume, folder, reference):
    resumed = train(folder, resume if resume is True else str(folder / resume))
    assert torch.equal(weights(resumed), reference[1])


NOTHING = [(True, "No valid checkpoint found"), ("elsewhere", "Can't find a valid checkpoint")]


@pytest.mark.parametrize(("wanted", "message"), NOTHING)
def test_where_nothing_is_the_trainer_says_so(wanted, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, wanted)


class StopAfter4(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 4


def test_killed_at_any_step_of_a_save_it_resumes_and_ends_as_if_it_had_not_been(folder, reference):
    settings = {"save_strategy": "no", "save_total_limit": 1, "callbacks": [StopAfter4()]}
    stopped = train(folder.with_name("stopped"), **settings)
    random_state = torch.get_rng_state()
    shutil.rmtree(folder / "checkpoint-4")

    def save(work, number):
        shutil.copytree(folder, work)
        torch.set_rng_state(random_state)
        stopped.args.output_dir = str(work)
        with killed_at(number) as steps:
            stopped._save_checkpoint(stopped.model, None)
        return steps[0]

    count = save(folder.with_name("counted"), 1000)
    assert count > 12
    newest = []
    for number in range(1, count + 1):
        work = folder.with_name(str(number))
        with pytest.raises(Killed):
            save(work, number)
        newest.append(Path(checkpoint_to_resume(stopped, True)).name)
        if number % 8 == 1 or number == count:  # a training takes its time
            assert torch.equal(weights(train(work, True)), reference[1]), number
            assert damage(work / "checkpoint-4") is None
            assert not (work / UNFINISHED).exists()
    assert set(newest) == {"checkpoint-2", "checkpoint-4"}


def test_a_folder_that_a_killed_trainer_left_half_is_passed_over(folder, caplog):
    (folder / "checkpoint-6").mkdir()
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(make(folder), True) == str(folder / "checkpoint-4")
    assert "checkpoint-6/trainer_state.json is missing" in caplog.text


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", None])
def test_checkpoints_of_a_plain_trainer_are_taken_where_all_states_are_there(name, tmp_path, caplog):
    train(tmp_path, trainer_class=Trainer, max_steps=4)
    trainer, newest = make(tmp_path), tmp_path / "checkpoint-4"
    if name is None:
        with caplog.at_level(logging.WARNING):
            assert checkpoint_to_resume(trainer, True) == str(newest)
        assert "damage to its files is not found" in caplog.text
        return
    (newest / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"checkpoint-4/{name} has 0 bytes"):
        trainer.train(resume_from_checkpoint=str(newest))
    (newest / name).unlink()
    with pytest.raises(ValueError, match=rf"checkpoint-4/{name} is missing.*save_only_model"):
        trainer.train(resume_from_checkpoint=str(newest))
    assert checkpoint_to_resume(trainer, True) == str(tmp_path / "checkpoint-2")


def test_saving_the_model_only_still_works_and_is_not_resumed_from(tmp_path):
    trainer = train(tmp_path, save_only_model=True, max_steps=2)
    checkpoint = tmp_path / "checkpoint-2"
    assert damage(checkpoint) is None
    assert torch.equal(load_file(checkpoint / "model.safetensors")["layer.weight"], weights(trainer))
    with pytest.raises(ValueError, match=r"optimizer.pt is missing.*save_only_model=True.*Start from step 0"):
        train(tmp_path, True)


LIMITS = [({"save_total_limit": 1}, [6]), ({"save_total_limit": 2}, [4, 6]), ({}, [2, 4, 6])]


@pytest.mark.parametrize(("limit", "stays"), LIMITS)
def test_the_limit_of_checkpoints_holds(limit, stays, tmp_path):
    train(tmp_path, **limit)
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in stays]


def test_a_new_checkpoint_stays_beside_a_damaged_one_of_more_steps(folder):
    (folder / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    train(folder, True, max_steps=3, save_steps=1, save_total_limit=1)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-3"]


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_the_best_model_is_kept_and_loaded(limit, tmp_path):
    """The measure falls, so the first checkpoint is the best one."""
    settings = {"load_best_model_at_end": True, "metric_for_best_model": "step", "greater_is_better": False}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": limit}
    expected, whole = (tmp_path / name for name in ("theirs", "ours"))

    def run(folder, trainer_class):
        trainer = make(folder, trainer_class, **settings)
        trainer.evaluate = lambda *_, **__: {"eval_step": trainer.state.global_step}
        trainer.train()
        return trainer

    theirs, ours = run(expected, Trainer), run(whole, ComeraTrainer)
    assert ours.state.best_model_checkpoint == str(whole / "checkpoint-2")
    assert torch.equal(weights(theirs), weights(ours))
    assert [path.name for path in checkpoints(whole)] == [path.name for path in checkpoints(expected)]
    for path in checkpoints(whole):
        assert damage(path) is None
        state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        assert state["best_model_checkpoint"] == str(whole / "checkpoint-2")


FULL = {  # which library meets it, and how that tells
    "torch": (torch, "save", RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos"), errno.EIO),
    "python": (torch, "save", OSError(errno.EROFS, "Read-only file system"), errno.EROFS),
    "safetensors": (Trainer, "save_model", SafetensorError("I/O error: full (os error 28)"), errno.ENOSPC),
    "fsync": (whole_checkpoint, "sync", OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
}


@pytest.mark.parametrize(("owner", "name", "error", "number"), FULL.values(), ids=FULL)
def test_a_full_disk_is_told_in_a_sentence_and_leaves_nothing(owner, name, error, number, folder, monkeypatch):
    trainer = make(folder)

    def full(*_, **__):
        raise error

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match=r"could not be written \(.*make room.*resume from checkpoint-4") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert caught.value.errno == number
    assert str(folder) in str(caught.value)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2", "checkpoint-4"]
    assert not (folder / UNFINISHED).exists()


def test_a_folder_removed_meanwhile_is_made_again(tmp_path):
    class Remover(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                shutil.rmtree(tmp_path / "out")

    train(tmp_path / "out", callbacks=[Remover()])
    assert [path.name for path in checkpoints(tmp_path / "out")] == ["checkpoint-4", "checkpoint-6"]


def test_what_is_pushed_lies_in_its_place(tmp_path):
    pushed = []

    class Pushing(ComeraTrainer):
        """As Transformers does with ``push_to_hub``, without a Hub."""

        def _save_checkpoint(self, model, trial):
            self.args.push_to_hub = True
            super()._save_checkpoint(model, trial)
            self.args.push_to_hub = False

    def push(self, folder):
        pushed.append((folder, damage(tmp_path / "checkpoint-2")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_push_from_checkpoint", push)
        train(tmp_path, trainer_class=Pushing, max_steps=2)
    assert pushed == [(str(tmp_path / "checkpoint-2"), None)]
