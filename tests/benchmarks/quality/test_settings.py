"""benchmarks/quality/settings.py and its grid: what cannot work is refused, and every combination is one run."""

import pytest

from benchmarks.quality.grid import grid
from benchmarks.quality.settings import parse_settings

REFUSED = [
    (["nli"], "Task nli needs --nli_file and --tokenizer"),
    (["code", "--code_file", "nowhere.parquet"], "--code_file nowhere.parquet was not found"),
    (["code", "--steps", "5", "--epochs", "2"], "--steps 5 and --epochs 2: give one"),
    (["bytes", "--epochs", "2"], "has no epochs. Use --steps 250"),
    (["--widths", "16", "30"], "--widths 30 cannot be split into 4 heads"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(options)


@pytest.mark.parametrize("options", [["--lrs", "0"], ["--lrs", "nan"], ["--ranks", "half"], ["--widths", "-4"]])
def test_numbers_must_be_positive(options, capsys):
    with pytest.raises(SystemExit):
        parse_settings(options)
    assert "is not a positive" in capsys.readouterr().err


def test_every_combination_is_a_run_and_dense_ones_have_no_rank():
    options = [
        "--update",
        "adamw",
        "--ranks",
        "8",
        "full",
        "--lrs",
        "1e-3",
        "1e-2",
        "--seeds",
        "0",
        "1",
    ]
    runs = grid(parse_settings(options), "text", 10)
    assert [run.form for run in runs] == ["dense"] * 4 + ["tt"] * 8
    assert {(run.rank, run.num_factors) for run in runs[:4]} == {("", "")}
    assert [(run.rank, run.lr, run.seed) for run in runs[4:7]] == [("8", 1e-3, 0), ("8", 1e-3, 1), ("8", 1e-2, 0)]
    assert str(runs[-1]) == "bytes: tt full, adamw, lr 0.01, width 256, seed 1"


def test_dense_runs_with_the_bytes_of_a_twin_have_its_rank():
    options = [
        "--update",
        "adamw",
        "--ranks",
        "8",
        "16",
        "--lrs",
        "1e-3",
        "--like_bytes_of",
        "tt",
        "--like_seconds_of",
        "dense",
    ]
    runs = grid(parse_settings(options), "text", 10)
    assert [(run.form, run.rank, run.budget) for run in runs] == [
        ("dense", "8", "bytes of tt"),
        ("dense", "16", "bytes of tt"),
        ("tt", "8", "seconds of dense"),
        ("tt", "16", "seconds of dense"),
    ]
