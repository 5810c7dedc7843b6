"""benchmarks/quality/mnli_table.py: runs that differ in the seed alone are one line, and pages quote kept rows."""

import csv
import re
import statistics

import pytest

from benchmarks.harness.timing import RESULTS
from benchmarks.quality import mnli_table
from loop.measure import replace_rows
from mnli.results import ROW_IDENTITY

STEPS_PER_EPOCH = 677


def row(seed, accuracy, **changes):
    made = dict.fromkeys(ROW_IDENTITY, "") | {
        "shapes": "paper", "optimizer": "tt_muon", "data": "mnli", "steps": 5, "learning_rate": 0.001, "seed": seed,
        "accuracy_validation": 0.5, "accuracy_test": accuracy, "parameters": 1485795, "dense_ratio": 45.06,
        "tensorised_ratio": 66.1, "seconds_per_epoch": 20, "bytes": 5943180,
    }  # fmt: skip
    return made | changes


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.csv"
    dense = row(1, 0.7, shapes="dense", accuracy_mismatched=0.6)
    replace_rows(path, [row(1, 0.6), row(2, 0.62), dense], ROW_IDENTITY)
    return path


def test_seeds_are_put_together(file, capsys):
    mnli_table.main([str(file), "--markdown"])
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4
    assert lines[2][:2] == ["paper, tt_muon", "mnli"]
    assert dict(zip(lines[0], lines[2], strict=False))["seeds"] == "2"
    assert dict(zip(lines[0], lines[2], strict=False))["test, %"] == "61.00 ± 1.41"
    assert dict(zip(lines[0], lines[3], strict=False))["mismatched, %"] == "60.00"
    assert lines[3][0] == "dense"


def test_terminal_table_has_the_same_figures(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    mnli_table.main([str(file)])
    assert "61.00 ± 1.41" in capsys.readouterr().out


def test_missing_file_says_how_to_make_one(tmp_path, capsys):
    with pytest.raises(SystemExit):
        mnli_table.main([str(tmp_path / "none.csv")])
    assert "--results_file" in capsys.readouterr().err


def quoted(page, heading):
    """Lines of the table whose headings begin like this: cells without bold type."""
    text = (RESULTS.parents[1] / page).read_text(encoding="utf-8")
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.replace("**", "")[1:-1].split("|")] for line in lines]


def kept(model, epochs, rate, ratio):
    """Accuracies in percent of the runs that a line of a page is about, by seed."""
    with (RESULTS / "train_mnli.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    dense_size = max(int(row["parameters"]) for row in rows)
    found = [
        row
        for row in rows
        if model.startswith(row["shapes"])
        and int(row["steps"]) == STEPS_PER_EPOCH * int(epochs)
        and rate in ("", f"{float(row['learning_rate']):.0e}".replace("e-0", "e-"))
        and f"{dense_size / int(row['parameters']):.0f}x" == ratio
    ]
    return {row["seed"]: float(row["accuracy_test"]) * 100 for row in found}


def figures(cell):
    return re.findall(r"\d+\.\d", cell)


def test_the_page_of_benchmarks_has_mean_range_and_standard_error_of_the_rows():
    lines = quoted("docs/benchmarks.md", "| model | epochs | fewer parameters |")
    assert len(lines) == 7
    for model, epochs, ratio, cell in lines:
        found = list(kept(model, epochs, "", ratio).values())
        error = statistics.stdev(found) / len(found) ** 0.5
        wanted = [statistics.fmean(found), min(found), max(found), error]
        assert figures(cell) == [f"{value:.1f}" for value in wanted], model


def test_the_page_on_ranks_has_mean_and_seeds_of_the_rows():
    lines = quoted("docs/ranks.md", "| model | epochs | rate | seeds |")
    assert len(lines) == 14
    for model, epochs, rate, num_seeds, _, _, ratio, *_, cell in lines:
        found = kept(model, epochs, rate, ratio)
        mean, *seeds = figures(cell)
        assert len(found) == int(num_seeds), model
        assert mean == f"{statistics.fmean(found.values()):.1f}", model
        assert not seeds or {f"{value:.1f}" for value in found.values()} <= set(seeds), model
