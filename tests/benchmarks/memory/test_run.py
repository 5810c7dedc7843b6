"""benchmarks/memory/run.py: every part runs, packages that are missing are named, and bars say what is missed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import candidates
from benchmarks.memory.policies import GROUPS
from benchmarks.memory.promises import Bar, beside_bar

ROOT = Path(__file__).resolve().parents[3]


def run(*options):
    program = [
        sys.executable,
        "-m",
        "benchmarks.memory.run",
        "--sizes",
        "tiny",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--no_save",
        *options,
    ]
    root = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "240"}
    result = subprocess.run(program, capture_output=True, text=True, timeout=280, env=root, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    lines = [line.strip("│").split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line] for line in lines]


@pytest.mark.parametrize("part", ["policies", pytest.param("models", marks=pytest.mark.slow)])
def test_policies(part):
    rows = run("--part", part)
    assert len(rows) == 8 * len(GROUPS[part, "tiny"])
    saved = {(row[0], row[1]): float(row[2]) for row in rows}
    assert saved["tensor train", "rank+fp8"] < saved["tensor train", "rank"] < saved["tensor train", "keep"]
    assert saved["dense", "fp8"] < saved["dense", "keep"]
    for row in rows:
        assert float(row[5]) > 0
        assert float(row[7]) < 1e-4 or "fp8" in row[1]


def test_methods(tmp_path):
    picture = tmp_path / "methods.png"
    options = ["--picture", str(picture)]
    rows = run("--part", "methods", *options)
    first, last = rows[0], rows[-1]
    assert first[:3] == ["dense", "adamw", "keep"]
    assert last[:3] == ["tensor train", "coat_adamw", "rank+fp8"]
    for row in rows:
        assert float(row[7]) == pytest.approx(sum(map(float, row[3:7])), abs=0.03)
    assert picture.stat().st_size > 1000


def test_losses(tmp_path):
    functions = [
        {"code": f"def f{n}(x):\n    y = x + {n}\n    return y", "docstring": f"Add {n}.", "split": split}
        for split, number in (("train", 40), ("valid", 8))
        for n in range(number)
    ]
    path = tmp_path / "code.jsonl"
    path.write_text("\n".join(map(json.dumps, functions)), encoding="utf-8")
    rows = run("--part", "losses", "--steps", "3", "--seeds", "0", "1", "--code_file", str(path))
    assert [row[0] for row in rows] == ["0", "1", "mean"]
    for row in rows:
        assert float(row[1]) == pytest.approx(float(row[2]), rel=0.01)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "galore_torch", None)
    assert "pip install galore-torch" in candidates.why_absent("galore, embedding too")
    assert candidates.why_absent("coat_adamw") is None


@pytest.mark.parametrize(
    ("bar", "figure", "cell"),
    [
        (None, 7.0, "x"),
        (Bar(1.25), 1.25, "[green]x (at most 1.25)[/green]"),
        (Bar(1.25), 1.26, "[red]x (missed: at most 1.25)[/red]"),
        (Bar(9, at_least=True), 31.0, "[green]x (at least 9)[/green]"),
        (Bar(9, at_least=True), 8.9, "[red]x (missed: at least 9)[/red]"),
    ],
)
def test_figures_beside_their_bars(bar, figure, cell):
    assert beside_bar(bar, figure, "x") == cell
