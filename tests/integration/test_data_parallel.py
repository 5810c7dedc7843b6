"""Two processes with gloo train a compressed model to the same losses as one process with the whole batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = "tests.integration.ddp_worker"


def run(optimizer, *launcher):
    program = [sys.executable, *launcher, "-m", WORKER, optimizer]
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert result.returncode == 0, result.stderr
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("RESULT"))[7:])


@pytest.mark.parametrize("optimizer", ["sgd", "coat", "tt_muon"])
def test_losses_and_weights_equal_those_of_one_process(optimizer):
    one = run(optimizer)
    two = run(optimizer, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["sum"] == pytest.approx(one["sum"], rel=1e-4)
    assert one["losses"][-1] < one["losses"][0]
