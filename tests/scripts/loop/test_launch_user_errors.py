"""scripts/loop/launch.py: what a user can mend ends a script with its message, anything else with its traceback."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from hf_comera import RankAdaptation
from hf_comera.training.whole_checkpoint import writing
from loop import launch
from loop.launch import run_script
from loop.settings import check_ranges

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (lambda: check_ranges({"rank": 0}, positive=["rank"]), "--rank 0 must be greater than 0."),
        (lambda: RankAdaptation(target_ratio=0.0), "target_ratio=0.0 is the wanted part"),
    ],
)
def test_message_stands_alone(main, message, capsys):
    assert run_script(main) == 2
    told = capsys.readouterr().err
    assert f"error: {message}" in told
    assert ", line " in told
    assert "--help" in told
    assert "Traceback" not in told


def test_one_process_of_many_tells(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_script(lambda: check_ranges({"rank": 0}, positive=["rank"])) == 2
    assert not capsys.readouterr().err


def test_errors_of_other_packages_keep_their_traceback(capsys):
    with pytest.raises(json.JSONDecodeError):
        run_script(lambda: json.loads("{"))
    assert not capsys.readouterr().err


def test_packages_of_others_below_a_clone_of_this_name_are_not_taken_for_ours(tmp_path):
    package = tmp_path / "hf_comera" / ".venv" / "other.py"
    assert launch._message(ValueError("theirs"), package) is None
    assert launch._message(ValueError("ours"), ROOT / "hf_comera" / "compress" / "plan.py") == "ours"


def raising(error):
    def main():
        raise error

    return main


def writing_below_a_file(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    return lambda: (tmp_path / "file" / "metrics.json").write_text("{}", encoding="utf-8")


DISK = {
    "full": (lambda _: raising(OSError(errno.ENOSPC, "-", "a/model.bin")), "a/model.bin (No space left on device)"),
    "read-only": (lambda _: raising(OSError(errno.EROFS, "-", "a")), "a (Read-only file system)"),
    "of safetensors": (lambda _: raising(SafetensorError("x (os error 28)")), "(No space left on device)"),
    "of tokenizers": (lambda _: raising(Exception("File too large (os error 27)")), "(File too large)"),
    "output below a file": (writing_below_a_file, "metrics.json (Not a directory)"),
}


@pytest.mark.parametrize(("main", "message"), DISK.values(), ids=DISK)
def test_what_a_disk_refuses_is_told_in_a_sentence(main, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "OWN_FOLDERS", (tmp_path / "elsewhere",))  # as if raised in another package
    assert run_script(main(tmp_path)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Make room" in told
    assert "Traceback" not in told


def test_a_file_that_another_package_misses_keeps_its_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        run_script(lambda: (tmp_path / "missing").read_text(encoding="utf-8"))


def test_a_checkpoint_that_cannot_be_written_is_told_with_its_remedy(tmp_path, capsys):
    def main():
        with writing(tmp_path / "checkpoint-1"):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert run_script(main) == 2
    told = capsys.readouterr().err
    assert "error: A checkpoint could not be written (No space left on device): make room" in told
    assert f"{tmp_path / 'checkpoint-1'}.\n" in told


def test_status_is_that_of_main():
    assert run_script(lambda: 130) == 130


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (
            ["scripts/train_mnli.py"],
            ["--dataset_name", "nyu-mll/glue", "--rank", "0"],
            "--rank 0 must be greater than 0.",
        ),
        (
            ["scripts/pretrain_codebert.py"],
            ["--learning-rte", "1"],
            "--learning-rte is not an option here. Did you mean",
        ),
        (
            ["-m", "benchmarks.quality.ranks"],
            ["--early", "0.8", "--late", "0.5"],
            "early=0.8 and late=0.5 are 400 and 250 steps",
        ),
    ],
)
def test_programs_tell_without_traceback(program, options, message):
    root = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *program, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=root, cwd=ROOT)
    assert result.returncode == 2
    assert f"{program[-1].removeprefix('scripts/')}: error: {message}" in result.stderr
    assert f"python {' '.join(program)} --help explains every option" in result.stderr
    assert "Traceback" not in result.stderr
