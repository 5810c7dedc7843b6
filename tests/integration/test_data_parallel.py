"""Two processes with gloo train a compressed model to the same losses as one process with the whole batch."""

import json

import pytest

from tests import processes


def run(optimizer, workers):
    result = processes.run("-m", "tests.integration.ddp_worker", optimizer, workers=workers)
    assert result.returncode == 0, result.stderr
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("RESULT"))[7:])


@pytest.mark.parametrize("optimizer", ["sgd", "coat", "tt_muon"])
def test_losses_and_weights_equal_those_of_one_process(optimizer):
    one, two = run(optimizer, workers=0), run(optimizer, workers=2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["sum"] == pytest.approx(one["sum"], rel=1e-4)
    assert one["losses"][-1] < one["losses"][0]
