"""Rows of the quality benchmark put together: one variant is everything but rate and seed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from interleaved_timing import MACHINE_IDENTITY
from quality_runs import RUN_COLUMNS, STEPS

Row = dict[str, str]
KEY = tuple(name for name in (*RUN_COLUMNS, *MACHINE_IDENTITY) if name not in ("lr", "seed"))
ALWAYS_SAID = ("task", "form", "rank", "update", "budget")


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
