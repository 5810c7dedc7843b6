"""hf_comera/cli/__init__.py and refusals.py: help teaches, misspelt words are named, errors are a panel and a code."""

import errno
import subprocess
import sys

import pytest

from hf_comera.cli import app, plan
from hf_comera.ops.cuda.build import KernelBuildError

COMMANDS = [command.name for command in app.registered_commands]


def test_help_lists_every_command(call):
    answer = call("--help")
    assert answer.code == 0
    assert len(COMMANDS) == 11
    assert all(f" {name} " in answer.out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example_with_its_options(command, call):
    answer = call(command, "--help")
    assert answer.code == 0
    assert f"hf-comera {command}" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(["plna", "x"], "'plan'"), (["plan", "x", "--rnak", "3"], "--rank")],
    ids=["command", "option"],
)
def test_a_misspelt_word_is_named(arguments, hint, call):
    answer = call(*arguments)
    assert answer.code == 2
    assert hint in answer.said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("rank=[0] is not positive"), 2),
        (OSError(errno.ENOSPC, "no space left", "[out]"), 1),
        (ImportError("matplotlib is missing"), 1),
        (KernelBuildError("no nvcc"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_a_panel_and_a_code(error, code, call, monkeypatch):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(plan, "find_model", fail)
    answer = call("plan", "x")
    assert (answer.code, answer.out) == (code, "")
    assert str(error) in answer.said


def test_a_mistake_of_ours_keeps_its_traceback(call, monkeypatch):
    monkeypatch.setattr(plan, "find_model", lambda *arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        call("plan", "x")


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "hf_comera", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m hf_comera" in done.stdout
