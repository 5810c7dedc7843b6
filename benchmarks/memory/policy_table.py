"""Write the table of activation policies in docs/memory.md from the rows that benchmarks/memory/run.py left.

python -m benchmarks.memory.policy_table
python -m benchmarks.memory.policy_table --check
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.pages import with_tables
from benchmarks.harness.timing import RESULTS

DESCRIPTION = """\
Between two comments, "activation policies table: begin" and ": end", stands what each
policy saves, its peak and its step, with and without dropout: the newest row of a case,
of any machine, as python -m benchmarks.memory.run --part policies measures it.
"""
PAGE = RESULTS.parents[1] / "docs" / "memory.md"
DROPOUTS = {"0.0": "no dropout", "0.1": "dropout 0.1"}
FIGURES = {"saved": ("saved_bytes", 1e-6, "MB"), "peak": ("peak_bytes", 1e-6, "MB"), "step": ("step_s", 1, "s")}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the table into the page, or compare the page with it."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.memory.policy_table", description=DESCRIPTION, formatter_class=keep_lines
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/memory.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the csv files; default: %(default)s")
    args = parser.parse_args(argv)
    with (args.results / "bench_memory.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "policies"]
    text = args.page.read_text(encoding="utf-8")
    try:
        updated = with_tables(text, {"activation policies": lambda: policy_table(rows)})
    except ValueError as problem:
        parser.error(str(problem))
    if args.check and updated != text:
        sys.exit(f"Not the rows of {args.results}: {args.page}. Run: python -m benchmarks.memory.policy_table")
    if not args.check:
        args.page.write_text(updated, encoding="utf-8")


def policy_table(rows: Iterable[Mapping[str, str]]) -> str:
    """One line for each form and policy, tensor trains first."""
    newest: dict[tuple[str, str], dict[str, Mapping[str, str]]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):  # stable: later lines of a day replace earlier ones
        newest.setdefault((row["form"], row["policy"]), {})[row["dropout"]] = row
    last_day = max(row["date"] for cases in newest.values() for row in cases.values())
    headings = [f"{figure}, {words}" for words in DROPOUTS.values() for figure in FIGURES]
    lines = [["model", "policy", *headings], ["---", "---", *["--:"] * len(headings)]]
    for (form, policy), cases in sorted(newest.items(), key=lambda item: item[0][0] == "dense"):
        if all(row["date"] != last_day for row in cases.values()):
            continue  # of an earlier version
        lines.append([form, f"`{policy}`".replace(",", "`,", 1).removesuffix("`" if "," in policy else "")])
        for dropout in DROPOUTS:
            lines[-1] += [_figure(cases.get(dropout), *how) for how in FIGURES.values()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _figure(row: Mapping[str, str] | None, column: str, factor: float, unit: str) -> str:
    if row is None or not row[column]:
        return ""
    value = float(row[column]) * factor
    return f"{value:,.0f} {unit}" if unit == "MB" else f"{value:.2f} {unit}"


if __name__ == "__main__":
    main()
