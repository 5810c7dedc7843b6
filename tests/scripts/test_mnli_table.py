"""scripts/mnli_table.py: runs that differ in the seed alone are one line, with mean and spread."""

import pytest

import mnli_table
from interleaved_timing import replace_rows
from nli_results import ROW_IDENTITY


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
