"""Print the table of the runs that train_mnli.py added to a csv file: a line a model, means over the seeds.

python -m benchmarks.quality.mnli_table
python -m benchmarks.quality.mnli_table my_results.csv --markdown
"""

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.timing import RESULTS
from mnli.results import ROW_IDENTITY

Row = dict[str, str]
HEADINGS = (
    "model", "data", "steps", "rate", "seeds", "parameters", "smaller", "TT layers", "bytes", "seconds an epoch",
)  # fmt: skip
CAPTION = "± standard deviation over the seeds"


def main(argv: Sequence[str] | None = None) -> None:
    """Read the file, print the table."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.quality.mnli_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = RESULTS / "train_mnli.csv"
    parser.add_argument("file", nargs="?", type=Path, default=default, help=f"default {default.name} of the results")
    parser.add_argument("--markdown", action="store_true", help="print it for a README")
    args = parser.parse_args(argv)
    if not args.file.is_file():
        parser.error(f"{args.file} is not a file here. Make one: scripts/train_mnli.py --results_file {args.file}")
    with args.file.open(newline="", encoding="utf-8") as file:
        lines = table_lines(list(csv.DictReader(file)))
    if args.markdown:
        print(markdown(lines))
    else:
        Console().print(rich_table(lines))


def table_lines(rows: Sequence[Row]) -> list[list[str]]:
    """The headings, then one line for all runs that differ in nothing but seed and machine."""
    measured = [name for name in dict.fromkeys(name for row in rows for name in row) if name.startswith("accuracy_")]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in ROW_IDENTITY if name != "seed"), []).append(row)
    headings = [*HEADINGS, *(name.removeprefix("accuracy_").replace("_", " ") + ", %" for name in measured)]
    return [headings, *(_line(group, measured) for group in groups.values())]


def rich_table(lines: Sequence[Sequence[str]]) -> Table:
    """The lines for a terminal."""
    table = Table(
        title="Accuracy on pairs of sentences", caption=CAPTION, title_justify="left", caption_justify="left"
    )
    for number, heading in enumerate(lines[0]):
        table.add_column(heading, justify="left" if number < 2 else "right")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The lines for a README."""
    rule = ["---" if number < 2 else "---:" for number in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))


def _line(rows: Sequence[Row], measured: Sequence[str]) -> list[str]:
    first = rows[0]
    parts = first["shapes"], first.get("ranks"), first["config_overrides"].replace(",", " ")
    model = ", ".join(filter(None, parts))
    if first["shapes"] != "dense":
        model += f", {first['optimizer']}"
    return [
        model,
        first["data"],
        f"{int(first['steps']):,}",
        f"{float(first['learning_rate']):g}",
        str(len({row["seed"] for row in rows})),
        f"{statistics.mean(int(row['parameters']) for row in rows):,.0f}",
        f"{statistics.mean(float(row['dense_ratio']) for row in rows):.1f}x",
        f"{statistics.mean(float(row['tensorised_ratio']) for row in rows):.1f}x",
        f"{statistics.mean(int(row['bytes']) for row in rows):,.0f}",
        _mean(rows, "seconds_per_epoch", 0),
        *(_mean(rows, name, 2, scale=100) for name in measured),
    ]


def _mean(rows: Sequence[Row], column: str, digits: int, scale: float = 1) -> str:
    values = [scale * float(row[column]) for row in rows if row.get(column)]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


if __name__ == "__main__":
    main()
