"""The results of the quality benchmark: csv files that several processes write at once, and their table."""

import csv
import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.table import Table

from benchmarks.quality.grid import RUN_COLUMNS, STEPS
from loop.measure import MACHINE_IDENTITY, replace_rows

IDENTITY = (*RUN_COLUMNS, *MACHINE_IDENTITY)
ROWS, CURVES = "bench_quality.csv", "bench_quality_curves.csv"
Row = dict[str, str]
KEY = tuple(name for name in (*RUN_COLUMNS, *MACHINE_IDENTITY) if name not in ("lr", "seed"))
ALWAYS_SAID = ("task", "form", "rank", "update", "budget")
HEADINGS = (
    "lr", "seeds", "steps", "training loss", "held-out loss", "test accuracy", "parameters", "compared", "training MB",
    "seconds", "ms a step", "optimizer",
)  # fmt: skip
BEST = "*"


class Results:
    """The two files in ``folder``: one row a run, and the points of its curve.

    A row is written after its points, so a run that has a row is complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.locks = folder / "locks"  # git ignores it
        self.locks.mkdir(parents=True, exist_ok=True)

    def rows(self, task: str | None = None) -> list[dict[str, str]]:
        """All rows, or those of one task."""
        return [row for row in self._read(ROWS) if task in (None, row["task"])]

    def curves(self) -> dict[str, list[dict[str, str]]]:
        """The points of every curve, by the name of the run."""
        curves: dict[str, list[dict[str, str]]] = {}
        for point in self._read(CURVES):
            curves.setdefault(point["run"], []).append(point)
        return curves

    def has(self, run_name: str) -> bool:
        """Whether the run is complete."""
        return any(row["run"] == run_name for row in self.rows())

    def save(self, row: Mapping[str, object], points: Sequence[Mapping[str, object]]) -> None:
        """Write the points, then the row."""
        named = [{"run": row["run"], **point} for point in points]
        with self._lock("files"):
            if named:
                replace_rows(self.folder / CURVES, named, ["run", "point"])
            replace_rows(self.folder / ROWS, [row], IDENTITY)

    @contextmanager
    def claim(self, run_name: str) -> Iterator[bool]:
        """Keep other processes from doing the same run; False if one is at it already."""
        lock = self._lock(run_name)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _lock(self, name: str) -> FileLock:
        return FileLock(self.locks / f"{name}.lock")

    def _read(self, name: str) -> list[dict[str, str]]:
        path = self.folder / name
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))


def run_name(row: Mapping[str, object]) -> str:
    """A short name that follows from all that identifies the run."""
    return _digest(*(f"{name}={row[name]}" for name in IDENTITY))


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Variant:
    """Runs that differ in rate and seed only."""

    label: str
    by_rate: dict[float, list[Row]]
    """Rows, one a seed, under their rate; rates rise."""

    @property
    def best_rate(self) -> float | None:
        """The rate with the lowest mean held-out loss; None if each has a run that diverged."""
        means = {rate: mean_and_spread(rows, "held_out_loss")[0] for rate, rows in self.by_rate.items()}
        finite = {rate: mean for rate, mean in means.items() if math.isfinite(mean)}
        return min(finite, key=finite.__getitem__) if finite else None

    @property
    def best(self) -> list[Row]:
        """The rows of the best rate; none if there is no best one."""
        return [] if self.best_rate is None else self.by_rate[self.best_rate]


def variants(rows: Sequence[Row]) -> list[Variant]:
    """All variants among the rows of one task, in the order of the file."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    varying = [
        name
        for place, name in enumerate(KEY)
        if name not in ALWAYS_SAID and len({key[place] for key in groups} - {""}) > 1
    ]
    found = []
    for group in groups.values():
        by_rate: dict[float, list[Row]] = {}
        for row in sorted(group, key=lambda row: float(row["lr"])):
            by_rate.setdefault(float(row["lr"]), []).append(row)
        found.append(Variant(_label(group[0], varying), by_rate))
    return found


def mean_and_spread(rows: Sequence[Row], column: str) -> tuple[float, float]:
    """Mean over the seeds, and half the distance between the largest and the smallest; NaN where one is missing."""
    values = [float(row[column]) if row.get(column) else math.nan for row in rows]
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return statistics.fmean(values), (max(values) - min(values)) / 2


def _label(row: Row, varying: Sequence[str]) -> str:
    words = [row["form"]]
    if row["form"] == "tt":
        words.append(f"rank {row['rank']}")
    elif row["rank"]:
        words.append(f"bytes of tt rank {row['rank']}")
    words.append(row["update"])
    if row["form"] == "tt" and row["budget"] != STEPS:
        words.append(row["budget"])
    words += [f"{name.replace('_', ' ')} {row[name]}" for name in varying if row[name]]
    return ", ".join(filter(None, words))


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
