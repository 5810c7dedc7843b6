"""Two processes with gloo train the same under an activation policy as without one, in replicas and in shards."""

import json

import pytest

from tests import processes


@pytest.mark.slow
def test_losses_and_weights_are_equal():
    result = processes.run("-m", "tests.integration.policy_worker", workers=2)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    found = {(way, policy): values for way, policy, values in (json.loads(line[7:]) for line in lines)}
    assert len(found) == 9
    for (way, _), values in found.items():
        plain = found[way, "none"]
        assert values["losses"] == plain["losses"]
        assert values["sum"] == plain["sum"]
        assert values is plain or values["bytes"] < plain["bytes"]
