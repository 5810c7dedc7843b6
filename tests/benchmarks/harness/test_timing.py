"""benchmarks/harness/timing.py: exact counts of saved bytes, and comparisons as tables and rows with their machine."""

import csv
import os

import pytest
import torch
from torch import nn

from benchmarks.harness import timing
from benchmarks.harness.timing import Comparison, benchmark_parser, check_agreement, report, saved_for_backward
from hf_comera.modules import TTLinear
from loop.measure import (
    DENSE,
    SPEED_VARIABLES,
    TENSOR_TRAIN,
    Timings,
)

FLOAT = 4
ROWS = 5


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def comparison(dense_seconds=(0.4, 0.2), tensor_train_seconds=(0.1, 0.1), **changes):
    values = {
        "case": {"shape": "8x8", "dtype": "fp32"},
        "timings": Timings({DENSE: list(dense_seconds), TENSOR_TRAIN: list(tensor_train_seconds)}),
        "saved_bytes": {DENSE: 160, TENSOR_TRAIN: 32},
        "peak_bytes": {DENSE: 900, TENSOR_TRAIN: None},
        "promised": 2.0,
    }
    return Comparison(**{**values, **changes})


@pytest.fixture
def only_allocator_setting(monkeypatch):
    """Sets the one variable that matters for speed, whatever the shell of the developer has."""
    for name in [name for name in os.environ if name.startswith(SPEED_VARIABLES)]:
        monkeypatch.delenv(name)
    return lambda value: monkeypatch.setenv("MALLOC_ARENA_MAX", value)


TENSOR_TRAIN_LAYER = TTLinear(64, 64, in_factors=(8, 8), out_factors=(8, 8), ranks=(8, 32, 8))
NUM_CORE_ENTRIES = 2 * (8 * 8 + 8 * 8 * 32)  # halves keep copies for their own backward
SAVED = [  # (module, input needs a gradient, bytes beyond parameters and input)
    pytest.param(nn.Linear(64, 6), True, 0, id="linear-saves-its-input-only"),
    pytest.param(nn.Tanh(), True, ROWS * 64 * FLOAT, id="tanh-saves-its-output"),
    pytest.param(nn.Sequential(nn.Linear(64, 6), nn.Tanh()), False, ROWS * 6 * FLOAT, id="two-layers"),
    pytest.param(nn.Sequential(nn.Tanh(), nn.Linear(64, 6)), True, ROWS * 64 * FLOAT, id="one-storage-saved-twice"),
    pytest.param(
        TENSOR_TRAIN_LAYER,
        True,
        ((ROWS + 128) * 32 + NUM_CORE_ENTRIES) * FLOAT,
        id="tensor-train-saves-codes-and-halves",
    ),
]


@pytest.mark.parametrize(("module", "needs_gradient", "expected"), SAVED)
def test_saved_bytes_are_exact(module, needs_gradient, expected):
    x = torch.randn(ROWS, 64, requires_grad=needs_gradient)
    assert saved_for_backward(lambda: module(x), [x, *module.parameters()]) == expected


def test_two_views_count_their_storage_once_and_whole_and_nothing_counts_without_gradients():
    weight = torch.randn(4, requires_grad=True)

    def compute():
        left, right = torch.randn(ROWS, 10).split(4, dim=1)[:2]
        return left @ weight + right @ weight

    assert saved_for_backward(compute, [weight]) == ROWS * 10 * FLOAT
    with torch.no_grad():
        assert saved_for_backward(compute, [weight]) == 0


def test_counting_leaves_the_gradients_right():
    x = torch.randn(ROWS, requires_grad=True)
    kept = []
    saved_for_backward(lambda: kept.append(x.exp().sum()), [x])
    kept[0].backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_candidates_that_disagree_are_refused(wrong):
    expected = torch.randn(3, 4)
    check_agreement("output", expected + 1e-7, expected, 1e-5)
    with pytest.raises(RuntimeError, match=r"8x8, output: what is compared differs by (0\.01|nan)"):
        check_agreement("8x8, output", expected * wrong, expected, 1e-5)


def test_report_prints_and_saves_the_figures_with_their_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["/some/where/benchmarks/speed/linear.py", "--rounds", "2"])
    report("Linear", [comparison(), comparison(case={"shape": "8x16", "dtype": "fp32"})], save_as="bench_linear")
    report("Linear", [comparison(tensor_train_seconds=(0.05, 0.05))], save_as="bench_linear")
    replaced, kept = read(tmp_path / "bench_linear.csv")
    assert (replaced["shape"], replaced["dense_ms"], replaced["tensor_train_ms"]) == ("8x8", "300.0", "50.0")
    assert (replaced["ratio"], kept["ratio"], kept["promised_ratio"]) == ("6.0", "3.0", "2.0")
    assert (kept["dense_saved_bytes"], kept["tensor_train_saved_bytes"], kept["rounds"]) == ("160", "32", "2")
    assert (kept["dense_peak_bytes"], kept["tensor_train_peak_bytes"]) == ("900", "")
    assert kept["torch"] == torch.__version__
    assert kept["command"] == "python -m benchmarks.speed.linear --rounds 2"
    assert "8x16" in capsys.readouterr().out


def test_without_a_name_nothing_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    report("Linear", [comparison(promised=None, unit="s")], save_as=None)
    assert not list(tmp_path.iterdir())
    assert "dense s" in capsys.readouterr().out


def test_figures_under_another_allocator_setting_are_rows_of_their_own(tmp_path, monkeypatch, only_allocator_setting):
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    for arenas in ("1", "2", "2"):
        only_allocator_setting(arenas)
        report("Linear", [comparison()], save_as="bench_linear")
    environments = [row["environment"] for row in read(tmp_path / "bench_linear.csv")]
    assert environments == ["MALLOC_ARENA_MAX=1", "MALLOC_ARENA_MAX=2"]


@pytest.mark.parametrize("option", [["--rounds", "0"], ["--threads", "-1"], ["--rounds", "many"]], ids=" ".join)
def test_counts_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        benchmark_parser("A benchmark.", rounds=3).parse_args(option)
    assert "is not a positive integer" in capsys.readouterr().err
