"""Take the rows that the GPU report measured into benchmarks/results/, where those of the same case are replaced.

python -m benchmarks.gpu.adopt outputs/gpu_report
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.page import KERNEL_ROWS, STEP_ROWS
from benchmarks.harness.timing import RESULTS
from benchmarks.kernels.run import IDENTITY
from benchmarks.speed.readme_table import COLUMNS
from loop.measure import MACHINE_IDENTITY, replace_rows

CASES = {KERNEL_ROWS: IDENTITY, STEP_ROWS: [*COLUMNS["bench_step"], "gpu", *MACHINE_IDENTITY]}
"""Columns that tell rows apart, by file."""


def main(argv: Sequence[str] | None = None) -> None:
    """Merge both files, unless they are of a rehearsal."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.adopt", description="Take the rows of a report of a GPU into benchmarks/results/."
    )
    parser.add_argument("folder", type=Path, help="of the report, as WORK= or OUT= named it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: benchmarks/results/")
    args = parser.parse_args(argv)
    header = Journal(args.folder / "journal.jsonl").header()
    if header is None or header["rehearsal"]:
        found = "no report" if header is None else "a rehearsal, whose figures mean nothing"
        parser.error(f"{args.folder} holds {found}. Needed: the folder of a report that a GPU made.")
    for name, identity in CASES.items():
        path = args.folder / name
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []
        if rows:
            replace_rows(args.results / name, rows, identity)
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
