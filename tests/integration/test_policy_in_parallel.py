"""Two processes with gloo train the same under an activation policy as without one, in replicas and in shards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = "tests.integration.policy_worker"


@pytest.mark.slow
def test_losses_and_weights_are_equal():
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", WORKER]
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    found = {(way, policy): values for way, policy, values in (json.loads(line[7:]) for line in lines)}
    assert len(found) == 9
    for (way, _), values in found.items():
        plain = found[way, "none"]
        assert values["losses"] == plain["losses"]
        assert values["sum"] == plain["sum"]
        assert values is plain or values["bytes"] < plain["bytes"]
