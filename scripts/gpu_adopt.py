"""Take the rows that gpu_report.py measured into scripts/results/, where those of the same case are replaced.

python scripts/gpu_adopt.py outputs/gpu_report
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from bench_kernels import IDENTITY
from gpu_journal import Journal
from gpu_page import KERNEL_ROWS, STEP_ROWS
from interleaved_timing import MACHINE_IDENTITY, RESULTS, replace_rows
from speed_names import COLUMNS

CASES = {KERNEL_ROWS: IDENTITY, STEP_ROWS: [*COLUMNS["bench_step"], "gpu", *MACHINE_IDENTITY]}
"""Columns that tell rows apart, by file."""


def main(argv: Sequence[str] | None = None) -> None:
    """Merge both files, unless they are of a rehearsal."""
    parser = argparse.ArgumentParser(description="Take the rows of a report of a GPU into scripts/results/.")
    parser.add_argument("folder", type=Path, help="of the report, as WORK= or OUT= named it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: scripts/results/")
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
