"""benchmarks/kernels/run.py: says that there is no GPU, and compares what it times."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


def run(*options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    program = [sys.executable, "-m", "benchmarks.kernels.run", "--rounds", "1", "--no-save", *options]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measures_nothing_without_a_gpu():
    assert "Nothing was measured: torch finds no CUDA device" in run()


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_runs_every_case(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_COMERA_CACHE", os.environ.get("HF_COMERA_CACHE", str(tmp_path)))
    printed = run("--emulated")
    products = ("forward bf16", "ffn forward bf16", "backward bf16", "ffn backward bf16", "40 x 64 x 96 r16")
    chains = ("halves bf16", "halves and gradients bf16", "2 layers x 64 x 96 r16", "lookup and gradients bf16")
    for word in ("x dense", "of floor", "Ceilings", *products, *chains):
        assert word in printed
