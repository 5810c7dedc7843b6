"""benchmarks/gpu/report.py: the whole command, rehearsed on a CPU; what a machine lacks, and what it goes on from."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import STEPS

ROOT = Path(__file__).resolve().parents[3]
needs_emulation = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
WITHOUT = "import sys\nfor name in {names}:\n    sys.modules[name] = None\n"
NOT_ON_THE_MACHINE = ("datasets", "matplotlib", "pandas")
"""Packages of the scripts that the report must do without."""


def call(folder, *words, rehearse=True, missing=(), timeout=280):
    """One call of the report, with packages that cannot be imported; what it printed."""
    hidden = folder / "hidden"
    hidden.mkdir(exist_ok=True)
    names = [*NOT_ON_THE_MACHINE, *missing]
    (hidden / "sitecustomize.py").write_text(WITHOUT.format(names=names), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    environment |= {"PYTHONPATH": str(hidden), "COLUMNS": "200"}
    program = [
        sys.executable,
        "-m",
        "benchmarks.gpu.report",
        "--work",
        str(folder / "work"),
        *(["--rehearse"] * rehearse),
        *words,
    ]
    done = subprocess.run(program, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr, Journal(folder / "work" / "journal.jsonl")


@needs_emulation
def test_a_step_and_then_another_machine(tmp_path):
    out = tmp_path / "out"
    status, printed, journal = call(tmp_path, "--out", str(out), "--only", "sanitizer-synccheck")
    assert status == 0, printed
    assert journal.closed("sanitizer-synccheck")["how"] == "complete"
    outcomes = {event["outcome"] for event in journal.outcomes("sanitizer-synccheck").values()}
    assert outcomes == {"passed"}
    assert "Call again to go on" in printed
    assert {path.name for path in out.iterdir()} == {"report.md", "report.csv", "journal.jsonl", "log.txt"}
    work = tmp_path / "work"
    shutil.rmtree(work)  # as on a fresh machine, which has but what was delivered
    status, printed, journal = call(tmp_path, "--out", str(out), "--seconds", "1")
    assert status == 0, printed
    assert journal.closed("sanitizer-synccheck")["how"] == "complete"
    assert not journal.outcomes("environment")


@needs_emulation
def test_tests_run_where_pytest_is_missing(tmp_path):
    status, printed, journal = call(tmp_path, "--only", "sanitizer-synccheck", missing=["pytest"])
    assert status == 0, printed
    assert "pytest is not installed" in printed
    outcomes = [event["outcome"] for event in journal.outcomes("sanitizer-synccheck").values()]
    assert outcomes.count("passed") == len(outcomes) >= 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_reported_without_a_gpu(tmp_path):
    status, printed, journal = call(tmp_path, rehearse=False)
    assert status == 2
    assert "torch finds no CUDA device" in printed
    assert journal.header() is None


def test_a_report_of_another_machine_is_not_gone_on_with(tmp_path):
    call(tmp_path, "--seconds", "1")
    status, printed, _ = call(tmp_path, "--seconds", "1", "--devices", '[{"name": "Other", "capability": [8, 0]}]')
    assert status == 2
    assert "holds a report of" in printed
    assert "WORK=FOLDER" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "step-1x1"], "There is no step 'step-1x1'. Needed: one of environment, "),
        (["--devices", "[]"], "--devices is for --rehearse alone"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, words, message):
    status, printed, _ = call(tmp_path, *words, rehearse=False)
    assert status == 2
    assert message in " ".join(printed.split())


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_target_takes_the_interpreter_as_it_is_given():
    words = [
        "make",
        "--no-print-directory",
        "--dry-run",
        "gpu-report",
        "PYTHON=/some/python",
        "ONLY=losses optimizers",
        "REHEARSE=1",
    ]
    environment = {**os.environ, "OUT": "/some/out"}
    printed = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=True).stdout
    command = " ".join(printed.replace("\\\n", " ").split())
    assert command.startswith("/some/python -m benchmarks.gpu.report --seconds 480 ")
    assert command.endswith('--out "/some/out" --only losses optimizers --rehearse')
    assert ".venv" not in command


@needs_emulation
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_command(tmp_path):
    status, printed, journal = call(tmp_path, "--seconds", "1400", timeout=1450)
    assert status == 0, printed
    assert "The report is complete." in printed
    for step in STEPS:
        assert journal.closed(step.name)["how"] == "complete", (step.name, journal.closed(step.name))
        bad = {case: event for case, event in journal.outcomes(step.name).items() if event["outcome"] == "failed"}
        assert not bad, (step.name, bad)
        assert journal.outcomes(step.name)
    page = (tmp_path / "work" / "report.md").read_text(encoding="utf-8")
    assert "not measured" not in page
    assert "repair first" not in page
