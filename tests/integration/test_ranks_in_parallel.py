"""Two processes with gloo train ranks to the same cuts and losses as one process with the whole batch."""

import json

import pytest

from tests import processes


def run(way, folder, workers):
    folder.mkdir()
    result = processes.run("-m", "tests.integration.rank_worker", way, folder, workers=workers)
    assert result.returncode == 0, result.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("way", ["loop", "loop-adamw", "trainer"])
def test_cuts_losses_and_weights_equal_those_of_one_process(way, tmp_path):
    (one,) = run(way, tmp_path / "one", workers=0)
    first, second = run(way, tmp_path / "two", workers=2)
    assert first == second
    assert first["ranks"] == one["ranks"]
    assert any(not any(ranks) for ranks in one["ranks"].values())  # a layer was removed on the way
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert first["sum"] == pytest.approx(one["sum"], rel=1e-3)
    assert one["size"] <= one["wanted"]
