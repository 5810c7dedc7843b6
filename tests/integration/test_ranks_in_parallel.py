"""Two processes with gloo train ranks to the same cuts and losses as one process with the whole batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(way, folder, *launcher):
    folder.mkdir()
    program = [sys.executable, *launcher, "-m", "tests.integration.rank_worker", way, str(folder)]
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert result.returncode == 0, result.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("way", ["loop", "loop-adamw", "trainer"])
def test_cuts_losses_and_weights_equal_those_of_one_process(way, tmp_path):
    (one,) = run(way, tmp_path / "one")
    first, second = run(way, tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert first == second
    assert first["ranks"] == one["ranks"]
    assert any(not any(ranks) for ranks in one["ranks"].values())  # a layer was removed on the way
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert first["sum"] == pytest.approx(one["sum"], rel=1e-3)
    assert one["size"] <= one["wanted"]
