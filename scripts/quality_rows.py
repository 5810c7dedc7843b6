"""The results of the quality benchmark as csv files that several processes read and write at once."""

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from interleaved_timing import MACHINE_IDENTITY, replace_rows
from quality_runs import RUN_COLUMNS

IDENTITY = (*RUN_COLUMNS, *MACHINE_IDENTITY)
ROWS, CURVES = "bench_quality.csv", "bench_quality_curves.csv"


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
