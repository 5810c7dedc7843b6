"""benchmarks/quality/results.py: means over seeds, and the best rate that never diverged."""

import math

import pytest
from rich.console import Console

from benchmarks.quality.results import IDENTITY, mean_and_spread, quality_table, variants


def row(lr, seed, loss, **changes):
    values = dict.fromkeys(IDENTITY, "") | {
        "task": "bytes", "form": "tt", "rank": "8", "update": "adamw", "lr": str(lr), "seed": str(seed),
        "budget": "steps", "width": "16", "num_factors": "3", "run": f"{lr}-{seed}", "status": "complete",
        "steps_done": "40", "training_loss": loss, "held_out_loss": loss, "accuracy": "", "parameters": "1000",
        "compared_parameters": "400", "training_bytes": "16000", "seconds": "2", "step_seconds": "0.05",
        "optimizer_share": "0.25",
    }  # fmt: skip
    return values | changes


ROWS = [
    row(0.01, 0, "", status="diverged"),
    row(0.01, 1, "1.0"),
    row(0.001, 0, "2.0"),
    row(0.001, 1, "2.5"),
    row(0.003, 0, "3.0"),
    row(0.001, 0, "1.9", form="dense", rank="", num_factors=""),
]


def test_variants_keep_rates_and_seeds_together():
    tensor_train, dense = variants(ROWS)
    assert {rate: len(rows) for rate, rows in tensor_train.by_rate.items()} == {0.001: 2, 0.003: 1, 0.01: 2}
    assert list(tensor_train.by_rate) == [0.001, 0.003, 0.01]
    assert tensor_train.best_rate == 0.001
    assert (tensor_train.label, dense.label) == ("tt, rank 8, adamw", "dense, adamw")


def test_labels_say_what_varies():
    budgets = [row(0.001, 0, "1"), row(0.001, 0, "1", budget="seconds of dense", width="32")]
    dense = row(0.001, 0, "1", form="dense", budget="bytes of tt", width="32")
    assert [variant.label for variant in variants([*budgets, dense])] == [
        "tt, rank 8, adamw, width 16",
        "tt, rank 8, adamw, seconds of dense, width 32",
        "dense, bytes of tt rank 8, adamw, width 32",
    ]


def test_nothing_is_best_where_all_diverged():
    (variant,) = variants([row(0.001, 0, "", status="diverged")])
    assert variant.best_rate is None
    assert variant.best == []


@pytest.mark.parametrize(("losses", "expected"), [(["1", "2", "6"], (3, 2.5)), (["4"], (4, 0))])
def test_mean_and_spread(losses, expected):
    rows = [row(0.001, seed, loss) for seed, loss in enumerate(losses)]
    assert mean_and_spread(rows, "held_out_loss") == expected
    assert all(math.isnan(value) for value in mean_and_spread([*rows, row(0.001, 9, "")], "held_out_loss"))


def test_table_marks_the_best_rate_and_says_what_diverged():
    console = Console(width=250, record=True)
    console.print(quality_table("bytes", ROWS))
    lines = [line.split("│")[1:-1] for line in console.export_text().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert [(line[0], line[1], line[5]) for line in cells] == [
        ("tt, rank 8, adamw", "*0.001", "2.250 ± 0.250"),
        ("", "0.003", "3.000"),
        ("", "0.01", "diverged 1 of 2"),
        ("dense, adamw", "*0.001", "1.900"),
    ]
