"""Makefile: what its targets run, as `make -n` tells."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands(target):
    """Lines that ``make target`` would run, with continued ones joined."""
    folder = Path(__file__).parents[2]
    told = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True).stdout
    return told.replace("\\\n", " ").splitlines()


def test_kernels_run_under_every_tool_of_the_sanitizer():
    lines = [line for line in commands("sanitize-gpu") if "--tool" in line]
    assert [line.split("--tool ")[1].split()[0] for line in lines] == [
        "memcheck",
        "initcheck",
        "racecheck",
        "synccheck",
    ]
    for line in lines:
        assert "--error-exitcode 1" in line  # else findings are printed and passed over
        assert "-m gpu tests/kernels" in line
    # torch's cache would hide where a tensor ends, and that its memory was never written
    assert ["PYTORCH_NO_CUDA_MEMORY_CACHING=1" in line for line in lines] == [True, True, False, False]


def test_every_benchmark_of_speed_is_run_and_all_that_are_named_exist():
    (line,) = [line for line in commands("bench") if line.lstrip().startswith("set -e; for name in ")]
    named = set(line.partition(" in ")[2].partition(";")[0].split())
    folder = Path(__file__).parents[2] / "benchmarks"
    assert not [name for name in named if not (folder / f"{name.replace('.', '/')}.py").is_file()]
    speed = {f"speed.{path.stem}" for path in (folder / "speed").glob("*.py")} - {"speed.__init__"}
    assert speed - {"speed.readme_table", "speed.picture"} <= named
