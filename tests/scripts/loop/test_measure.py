"""scripts/loop/measure.py: fair turns, csv rows that are replaced, not lost, and where and how they were measured."""

import csv
import gc
import os
import sys

import pytest
import torch

from loop.measure import SPEED_VARIABLES, Timings, machine, replace_rows, rotated, time_interleaved


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def only_allocator_setting(monkeypatch):
    """Sets the one variable that matters for speed, whatever the shell of the developer has."""
    for name in [name for name in os.environ if name.startswith(SPEED_VARIABLES)]:
        monkeypatch.delenv(name)
    return lambda value: monkeypatch.setenv("MALLOC_ARENA_MAX", value)


@pytest.mark.parametrize(
    ("turn", "order"), [(0, "abc"), (1, "bca"), (2, "cab"), (3, "abc"), (-1, "cab")], ids=lambda value: str(value)
)
def test_order_rotates(turn, order):
    assert rotated(["a", "b", "c"], turn) == list(order)


def test_every_candidate_runs_once_a_round_in_rotated_order_after_the_warmup():
    runs = []
    candidates = {name: lambda name=name: runs.append(name) for name in "abc"}
    timings = time_interleaved(candidates, rounds=4, warmup=2)
    assert "".join(runs) == "bca" + "cab" + "abc" + "bca" + "cab" + "abc"
    assert {name: len(seconds) for name, seconds in timings.seconds.items()} == {"a": 4, "b": 4, "c": 4}


def test_garbage_collection_is_off_while_candidates_run_and_on_again_after_an_error():
    def fail():
        assert not gc.isenabled()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_interleaved({"a": fail}, rounds=1)
    assert gc.isenabled()


def test_ratio_is_the_median_of_the_ratios_within_rounds():
    timings = Timings({"base": [2.0, 20.0, 6.0], "fast": [1.0, 10.0, 2.0]})  # the second round was slow for both
    assert timings.ratio("fast", "base") == 2.0
    assert timings.median("base") == 6.0


def test_rows_of_the_same_identity_are_replaced_in_place_and_others_kept(tmp_path):
    path = tmp_path / "results" / "bench.csv"
    identity = ["shape", "processor"]
    replace_rows(path, [{"shape": s, "processor": "A", "ms": 1.5} for s in ("8x8", "8x16")], identity)
    replace_rows(path, [{"shape": "8x8", "processor": "B, fast", "ms": 2}], identity)
    replace_rows(path, [{"shape": "8x8", "processor": "A", "ms": 3}], identity)
    assert [(row["shape"], row["processor"], row["ms"]) for row in read(path)] == [
        ("8x8", "A", "3"),
        ("8x16", "A", "1.5"),
        ("8x8", "B, fast", "2"),
    ]
    assert [file.name for file in path.parent.iterdir()] == ["bench.csv"]


def test_identity_is_compared_as_written_so_that_numbers_match_their_text(tmp_path):
    path = tmp_path / "bench.csv"
    for seconds in (1, 2):
        replace_rows(path, [{"dropout": 0.1, "cores": 2, "s": seconds}], ["dropout", "cores"])
    assert read(path) == [{"dropout": "0.1", "cores": "2", "s": "2"}]


def test_columns_that_come_and_go_lose_no_figure(tmp_path):
    path = tmp_path / "bench.csv"
    replace_rows(path, [{"shape": "8x8", "old": 1}], ["shape"])
    replace_rows(path, [{"shape": "8x16", "new": 2}], ["shape"])
    assert read(path) == [{"shape": "8x8", "new": "", "old": "1"}, {"shape": "8x16", "new": "2", "old": ""}]


def test_machine_says_where_when_and_with_what(only_allocator_setting):
    only_allocator_setting("2")
    here = machine()
    assert all(here.values())
    assert here["threads"] == torch.get_num_threads()
    assert here["environment"] == "MALLOC_ARENA_MAX=2"


@pytest.mark.parametrize(
    ("path", "program"),
    [
        ("/home/someone/benchmarks/speed/step.py", "python -m benchmarks.speed.step"),
        ("/home/benchmarks/clone/benchmarks/gpu/report.py", "python -m benchmarks.gpu.report"),
        ("/home/someone/scripts/train_mnli.py", "python scripts/train_mnli.py"),
    ],
)
def test_commands_name_the_program_and_files_without_their_folders(path, program, monkeypatch):
    monkeypatch.setattr(sys, "argv", [path, "--code_file", "/data/code.parquet", "--rounds", "3"])
    assert machine()["command"] == f"{program} --code_file code.parquet --rounds 3"
