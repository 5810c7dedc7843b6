"""The training scripts on a disk that refuses: one sentence, nothing half left, and resuming once there is room."""

import json
import resource
import shutil

import pytest

import pretrain_codebert
from codebert import run as codebert_run
from hf_comera.training.whole_checkpoint import checkpoints, damage
from loop.launch import run_script

TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,hidden_dropout_prob=0.1"


@pytest.fixture
def arguments(tmp_path):
    rows = [{"code": f"def f{n}(value):\n    return value + {n}", "docstring": f"Add {n}."} for n in range(40)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        "--train_file", str(file), "--output_dir", str(tmp_path / "out"), "--config_overrides", TINY, "--use_cpu",
        "--vocab_size", "280", "--max_seq_length", "48", "--per_device_train_batch_size", "4", "--num_threads", "1",
        "--max_train_steps", "6", "--eval_steps", "6", "--rank", "4", "--speed_comparison_steps", "0",
        "--checkpointing_steps", "2",
    ]  # fmt: skip


def run(arguments, capsys):
    """Status, and what was told beside progress bars."""
    capsys.readouterr()
    status = run_script(lambda: pretrain_codebert.main(arguments))
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return status, told[told.rfind("error: ") :] if "error: " in told else ""


def losses(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["losses"]


def no_file_larger(monkeypatch, owner, name, limit, calls=None):
    """While ``owner.name`` runs the system refuses files above ``limit`` bytes; with ``calls`` only from then on."""
    operation, count = getattr(owner, name), [0]

    def limited(*args, **kwargs):
        count[0] += 1
        if calls is not None and count[0] < calls:
            return operation(*args, **kwargs)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            return operation(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(owner, name, limited)


@pytest.mark.parametrize("limit", [1_000, 90_000], ids=["no weights", "no state of the optimizer"])
def test_a_checkpoint_for_which_there_is_no_room(limit, arguments, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        no_file_larger(patch, codebert_run, "save_checkpoint", limit, calls=2)
        status, told = run(arguments, capsys)
    assert status == 2
    assert told.startswith("error: A checkpoint could not be written (")
    assert "resume from checkpoint-2, the newest that is there" in told
    assert [path.name for path in folder.glob("*") if path.name != "tokenizer"] == ["checkpoint-2"]
    assert damage(folder / "checkpoint-2") is None
    if limit < 90_000:  # training takes its time
        return
    assert run([*arguments, "--resume_from_checkpoint", "latest"], capsys)[0] == 0
    resumed = losses(folder)
    shutil.rmtree(folder)
    assert run(arguments, capsys)[0] == 0
    assert losses(folder) == resumed


def test_a_model_for_which_there_is_no_room(arguments, tmp_path, monkeypatch, capsys):
    no_file_larger(monkeypatch, pretrain_codebert, "finish", 1_000)
    status, told = run(arguments, capsys)
    assert status == 2
    assert told.startswith("error: The model could not be saved (File too large)")
    assert [path.name for path in checkpoints(tmp_path / "out")] == ["checkpoint-2", "checkpoint-4"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokenizer", "checkpoint-2", "checkpoint-4"}


def test_an_output_that_is_a_file(arguments, tmp_path, capsys):
    (tmp_path / "out").write_text("", encoding="utf-8")
    status, told = run(arguments, capsys)
    assert status == 2
    assert f"--output_dir {tmp_path / 'out'} cannot be made (File exists" in told


def test_an_output_folder_that_is_removed_meanwhile(arguments, tmp_path, monkeypatch, capsys):
    step = pretrain_codebert.optimizer_step

    def remove_and_step(run, batches):
        if run.step == 3:
            shutil.rmtree(tmp_path / "out")
        step(run, batches)

    monkeypatch.setattr(pretrain_codebert, "optimizer_step", remove_and_step)
    assert run(arguments, capsys)[0] == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"model.safetensors", "metrics.json", "tokenizer.json"}
