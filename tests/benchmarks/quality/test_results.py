"""benchmarks/quality/results.py: processes that write at once lose nothing, and each run is claimed by one of them."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.quality.results import IDENTITY, Results, run_name

ROOT = Path(__file__).resolve().parents[3]
WRITER = """\
import sys
from pathlib import Path
from benchmarks.quality.results import IDENTITY, Results
results = Results(Path(sys.argv[1]))
for seed in map(int, sys.argv[2:]):
    row = dict.fromkeys(IDENTITY, "") | {"task": "bytes", "seed": seed, "run": seed}
    results.save(row, [{"point": 1, "step": 5}, {"point": 2, "step": 10}])
"""


def row(**changes):
    return dict.fromkeys(IDENTITY, "") | {"task": "bytes", "lr": 0.1} | changes


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    sources = os.environ | {"PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), *map(str, seeds)], env=sources)
        for seeds in (range(8), range(8, 16))
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    results = Results(tmp_path)
    assert sorted(int(row["seed"]) for row in results.rows("bytes")) == list(range(16))
    assert {len(points) for points in results.curves().values()} == {2}
    assert len(results.curves()) == 16


def test_a_run_is_claimed_once_at_a_time(tmp_path):
    one, other = Results(tmp_path), Results(tmp_path)
    with one.claim("a") as mine:
        assert mine
        with other.claim("a") as too, other.claim("b") as another:
            assert (too, another) == (False, True)
    with other.claim("a") as free:
        assert free


def test_a_run_done_again_replaces_its_row_and_its_curve(tmp_path):
    results = Results(tmp_path)
    for loss in (2, 1):
        results.save(row(run="a", loss=loss), [{"point": point, "loss": loss} for point in (1, 2)])
    assert results.has("a")
    assert not results.has("b")
    assert [one["loss"] for one in results.rows()] == ["1"]
    assert [point["loss"] for point in results.curves()["a"]] == ["1", "1"]
    assert results.rows("nli") == []


def test_name_follows_from_what_identifies_a_run_and_nothing_else():
    assert run_name(row()) == run_name(row(date="today", lr="0.1"))
    assert len({run_name(row()), run_name(row(lr=0.2)), run_name(row(threads=2)), run_name(row(seed=1))}) == 4
