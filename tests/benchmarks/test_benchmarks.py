"""benchmarks/: every benchmark still runs, checks its results before timing, and prints its ratio."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loop import memory

ROOT = Path(__file__).resolve().parents[2]

NOT_ALWAYS = {"promised ratio", "gpu", "graphs", "kernels"}
"""Figures that a row may be without."""


@pytest.mark.parametrize(
    ("benchmark", "options", "expected"),
    [
        ("speed.linear", ["--rows", "64", "--keep-freed-memory"], "ratio"),
        ("speed.lookup", [], "ratio"),
        ("speed.head", ["--vocabulary", "120", "--tokens", "40"], "ratio"),
        ("speed.decomposition", [], "relative error"),
        (
            "quality.optimizer_states",
            ["--steps", "5", "--width", "16", "--rank", "4"],
            "error both expanded",
        ),
        pytest.param("speed.inference", [], "halves anew ms", marks=pytest.mark.slow),
        pytest.param("speed.step", [], "ratio", marks=pytest.mark.slow),
        pytest.param("speed.adaptation", [], "objective share", marks=pytest.mark.slow),
    ],
)
def test_runs(benchmark, options, expected):
    program = [
        sys.executable,
        "-m",
        f"benchmarks.{benchmark}",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--no-save",
        *options,
    ]
    root = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(program, capture_output=True, text=True, timeout=280, env=root, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
    rows = [line.strip("│").split("│") for line in result.stdout.splitlines() if line.startswith("│ ")]
    empty = {row[0].strip() for row in rows if not all(cell.strip() for cell in row)}
    without_peaks = set() if memory.CLEAR_REFS.exists() else {"dense peak bytes", "tensor train peak bytes"}
    if expected in ("ratio", "halves anew ms"):
        assert empty <= NOT_ALWAYS | without_peaks


@pytest.mark.parametrize("way", ["as it is", "norm alone"])
def test_ranks_are_compared_at_one_size(way):
    options = ["--way", way, "--steps", "6", "--width", "32", "--rank", "8", "--small_rank", "4", "--no-save"]
    root = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    program = [sys.executable, "-m", "benchmarks.quality.ranks", *options]
    result = subprocess.run(program, capture_output=True, text=True, timeout=280, env=root, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    table = [re.split("[│┃]", line)[1:-1] for line in result.stdout.splitlines() if line[:1] in ("│", "┃")]
    names, *rows = [[cell.strip() for cell in line] for line in table]
    found = {row[0]: dict(zip(names, row, strict=True)) for row in rows}
    assert found["cut"]["stages"] == "0.4 early, 0.3 late"
    assert found["cut"]["way"] == ("" if way == "as it is" else way)
    sizes = {form: int(row["core parameters"]) for form, row in found.items()}
    assert sizes["kept"] > sizes["small"] >= sizes["cut"] > 0.8 * sizes["small"]
