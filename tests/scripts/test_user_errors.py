"""scripts/user_errors.py: what a user can mend ends a script with its message, anything else with its traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_comera import RankAdaptation
from loop_settings import check_ranges
from user_errors import run_script

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


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


def test_status_is_that_of_main():
    assert run_script(lambda: 130) == 130


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("train_mnli.py", ["--dataset_name", "nyu-mll/glue", "--rank", "0"], "--rank 0 must be greater than 0."),
        ("pretrain_codebert.py", ["--learning-rte", "1"], "--learning-rte is not an option here. Did you mean"),
        ("bench_ranks.py", ["--early", "0.8", "--late", "0.5"], "early=0.8 and late=0.5 are 400 and 250 steps"),
    ],
)
def test_scripts_tell_without_traceback(script, options, message):
    root = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    program = [sys.executable, str(SCRIPTS / script), *options]
    result = subprocess.run(program, capture_output=True, text=True, timeout=280, env=root)
    assert result.returncode == 2
    assert f"{script}: error: {message}" in result.stderr
    assert "Traceback" not in result.stderr
