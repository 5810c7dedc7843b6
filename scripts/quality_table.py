"""The table of the quality benchmark: one line a variant and rate, means over the seeds, best rates marked."""

import math
from collections.abc import Sequence

from rich.table import Table

from quality_variants import Row, Variant, mean_and_spread, variants

HEADINGS = (
    "lr", "seeds", "steps", "training loss", "held-out loss", "test accuracy", "parameters", "compared", "training MB",
    "seconds", "ms a step", "optimizer",
)  # fmt: skip
BEST = "*"


def quality_table(task: str, rows: Sequence[Row]) -> Table:
    """All rows of one task."""
    caption = f"{BEST} best rate of its line; ± half the range over the seeds"
    table = Table(title=f"Task {task}", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("model and update")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for variant in variants(rows):
        for number, rate in enumerate(variant.by_rate):
            table.add_row(variant.label if number == 0 else "", *_cells(variant, rate))
        table.add_section()
    return table


def _cells(variant: Variant, rate: float) -> list[str]:
    rows = variant.by_rate[rate]
    mark = BEST if rate == variant.best_rate else ""
    num_diverged = sum(row["status"] == "diverged" for row in rows)
    held_out = _mean(rows, "held_out_loss", 3)
    if num_diverged:
        held_out = f"diverged {num_diverged} of {len(rows)}"
    size, step = mean_and_spread(rows, "training_bytes")[0] / 1e6, mean_and_spread(rows, "step_seconds")[0] * 1e3
    return [
        f"{mark}{rate:g}",
        str(len(rows)),
        "/".join(dict.fromkeys(row["steps_done"] for row in rows)),
        _mean(rows, "training_loss", 3),
        held_out,
        _mean(rows, "accuracy", 4),
        f"{int(rows[0]['parameters']):,}",
        f"{int(rows[0]['compared_parameters']):,}",
        _number(size, 2),
        _mean(rows, "seconds", 1),
        _number(step, 1),
        _number(mean_and_spread(rows, "optimizer_share")[0], 2),
    ]


def _mean(rows: Sequence[Row], column: str, digits: int) -> str:
    mean, spread = mean_and_spread(rows, column)
    text = _number(mean, digits)
    return f"{text} ± {spread:.{digits}f}" if text and len(rows) > 1 else text


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else ""
