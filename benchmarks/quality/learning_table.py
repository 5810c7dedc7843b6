"""Write the tables of learning in docs/benchmarks.md and docs/learning.md from the rows of benchmarks.quality.run.

    python -m benchmarks.quality.learning_table
    python -m benchmarks.quality.learning_table --check

`--help` says which rows are taken.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness.pages import with_tables
from benchmarks.harness.timing import RESULTS
from benchmarks.quality.grid import STEPS
from benchmarks.quality.results import Results, Row, Variant, mean_and_spread

DESCRIPTION = """\
Between two comments, "best rates table: begin" and "best rates table: end", stands
what each model learned at its own best rate, the one with the lowest held-out loss.
Between "equal seconds table: begin" and ": end" stand tensor trains beside dense
models under Muon after as many seconds. The seconds of a step are the least of all
runs of that model, as runs beside other jobs say nothing about it; the loss of the
dense model is read off its curve.

Rows are those of three factors a side, width 256 and the steps below, on any
machine; of several rows of one rate and seed the newest counts.
"""
ROOT = RESULTS.parents[1]
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "learning.md")
Curves = dict[str, list[Row]]


class Model(NamedTuple):
    """One line of the tables: columns of a row."""

    form: str
    rank: str
    update: str


class Task(NamedTuple):
    """One column of the table of best rates."""

    heading: str
    name: str
    steps: str
    figure: str = "held_out_loss"


DENSE_MUON = Model("dense", "", "muon")
MODELS = {
    "dense, AdamW": Model("dense", "", "adamw"),
    "dense, Muon": DENSE_MUON,
    "rank 32, AdamW": Model("tt", "32", "adamw"),
    "rank 16, `TTMuon`": Model("tt", "16", "muon"),
    "rank 32, `TTMuon`": Model("tt", "32", "muon"),
    "rank 64, `TTMuon`": Model("tt", "64", "muon"),
}
TASKS = (
    Task("GPT-2 on bytes, held-out loss", "bytes", "250"),
    Task("RoBERTa on masked code, held-out loss", "code", "1000"),
    Task("BERT on sentence pairs, five epochs, accuracy", "nli", "3385", "accuracy"),
)
BEST_RATES = ("model and update", *(task.heading for task in TASKS))
EQUAL_SECONDS = (
    "task", "model", "steps", "seconds", "held-out loss", "dense Muon, steps in as many seconds", "held-out loss then",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables into the pages, or compare them with it."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.quality.learning_table", description=DESCRIPTION, formatter_class=keep_lines
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help="default: two of docs/")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the csv files; default: %(default)s")
    args = parser.parse_args(argv)
    results = Results(args.results)
    rows, curves = results.rows(), results.curves()
    tables: dict[str, Callable[[], str]] = {
        "best rates": lambda: best_rates_table(rows),
        "equal seconds": lambda: equal_seconds_table(rows, curves),
    }
    texts = {page: page.read_text(encoding="utf-8") for page in args.pages}
    try:
        updated = {page: with_tables(text, tables) for page, text in texts.items()}
    except ValueError as problem:
        parser.error(str(problem))
    stale = [str(page) for page in texts if updated[page] != texts[page]]
    if args.check and stale:
        sys.exit(
            f"Not the rows of {args.results}: {', '.join(stale)}. Run: python -m benchmarks.quality.learning_table"
        )
    if not args.check:
        for page, text in updated.items():
            page.write_text(text, encoding="utf-8")


def best_rates_table(rows: Sequence[Row]) -> str:
    """Every model of ``MODELS`` at its best rate, each task a column."""
    lines = [
        [label, *(_best(find(rows, task.name, task.steps, model), task.figure) for task in TASKS)]
        for label, model in MODELS.items()
    ]
    return _markdown(BEST_RATES, lines, num_words=1)


def equal_seconds_table(rows: Sequence[Row], curves: Curves) -> str:
    """Tensor trains at their best rate, and dense models under Muon at theirs in the seconds that these took."""
    lines = []
    for task in TASKS:
        dense = find(rows, task.name, task.steps, DENSE_MUON)
        if not dense.best:
            continue
        for label, model in MODELS.items():
            train = find(rows, task.name, task.steps, model)
            if model.form == "tt" and model.update == DENSE_MUON.update and train.best:
                lines.append([task.heading.partition(",")[0], label, *_equal_seconds(train, dense, curves)])
    return _markdown(EQUAL_SECONDS, lines, num_words=2)


def find(rows: Sequence[Row], task: str, steps: str, model: Model) -> Variant:
    """The runs of one model on one task, of all machines, the newest of each rate and seed."""
    wanted = {
        "task": task, "steps": steps, "form": model.form, "rank": model.rank, "update": model.update,
        "width": "256", "num_factors": "3" if model.rank else "", "budget": STEPS,
    }  # fmt: skip
    chosen = [row for row in rows if all(row[column] == value for column, value in wanted.items())]
    newest = {(float(row["lr"]), row["seed"]): row for row in sorted(chosen, key=lambda row: row["date"])}
    by_rate: dict[float, list[Row]] = {}
    for (rate, _), row in sorted(newest.items()):
        by_rate.setdefault(rate, []).append(row)
    return Variant("", by_rate)


def loss_after(points: Sequence[Row], step: float) -> float:
    """Held-out loss of one run after so many steps, between the two points where it was measured.

    Raises:
        ValueError: If the run did not last so long, or was not measured so early.
    """
    measured = [(float(point["step"]), float(point["held_out_loss"])) for point in points if point["held_out_loss"]]
    steps, losses = zip(*measured, strict=True)
    if not steps[0] <= step <= steps[-1]:
        raise ValueError(f"{step:g} steps: held-out losses of this run are from step {steps[0]:g} to {steps[-1]:g}.")
    return float(np.interp(step, steps, losses))


def _equal_seconds(train: Variant, dense: Variant, curves: Curves) -> list[str]:
    num_steps = int(train.best[0]["steps_done"])
    seconds = num_steps * _step_seconds(train)
    dense_steps = seconds / _step_seconds(dense)
    loss, _ = mean_and_spread(train.best, "held_out_loss")
    dense_loss = statistics.fmean(loss_after(curves[row["run"]], dense_steps) for row in dense.best)
    return [
        str(num_steps), f"{seconds:.0f}", f"{loss:.3f} {_setting(train)}",
        f"{dense_steps:.0f}", f"{dense_loss:.3f} {_setting(dense)}",
    ]  # fmt: skip


def _step_seconds(variant: Variant) -> float:
    return min(float(row["step_seconds"]) for rows in variant.by_rate.values() for row in rows)


def _best(variant: Variant, figure: str) -> str:
    if not variant.best:
        return ""
    mean, _ = mean_and_spread(variant.best, figure)
    value = f"{mean * 100:.1f} %" if figure == "accuracy" else f"{mean:.3f}"
    return f"{value} {_setting(variant)}"


def _setting(variant: Variant) -> str:
    """Best rate, whether others were tried, and seeds."""
    assert variant.best_rate is not None
    mantissa, exponent = f"{variant.best_rate:.1e}".split("e")
    alone = " alone" if len(variant.by_rate) == 1 else ""
    num_seeds = len(variant.best)
    return f"({float(mantissa):g}e{int(exponent)}{alone}, {num_seeds} seed{'s' * (num_seeds > 1)})"


def _markdown(headings: Sequence[str], lines: Sequence[Sequence[str]], num_words: int) -> str:
    rule = ["---"] * num_words + ["--:"] * (len(headings) - num_words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines))


if __name__ == "__main__":
    main()
