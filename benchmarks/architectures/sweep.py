"""Check every architecture of Transformers in tensor-train form against its dense baseline, and write what was found.

    python -m benchmarks.architectures.sweep
    python -m benchmarks.architectures.sweep mixtral whisper --again
    python -m benchmarks.architectures.sweep --page-only

`--help` says what is checked.
"""

import argparse
import csv
import datetime
import importlib.metadata
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.architectures.checks import CHECKS, DENSE, sweep_architecture
from benchmarks.architectures.classes import model_types
from benchmarks.architectures.page import PAGE, VERDICTS, verdict_of, with_tables
from benchmarks.harness.process import Stopped, call_limited
from benchmarks.harness.timing import RESULTS, positive_integer
from loop.measure import replace_rows

DESCRIPTION = """\
A row for each model type of Transformers' automatic classes, one class for each
(sequence to sequence, masked, causal, CTC, ..., else the base model). A process
of its own builds a small model from the default config: two layers, 64 wide. If
the dense model runs forward and backward, these are compared with it:

scratch     built in tensor-train form at rank 8, forward
backward    gradients, wherever the merged dense model has some
reload      save_pretrained and from_pretrained: equal to the bit, no key amiss
policy      activation policy "rank" in training mode: the same gradients
merge       merge_and_unload: the same outputs (2e-3)
full_rank   a live dense model compressed without loss: outputs (5e-3), gradients
            of what stays dense (2e-2)
generation  six tokens, greedy, with a cache: those of the merged model

Beside them: how much of a model of full size (default config, at most four
layers, meta device) the default targets leave dense, and the largest such part.
"""
EPILOG = """\
A sweep of all architectures takes about an hour on one core. It goes on where it
was stopped: rows of the installed torch and Transformers are kept unless --again
is given, or --retry and the row is no success. The page is written anew with
each row; a test compares the two. To look at a failure, run the script with that
model type alone.
"""
IMPORTED_ONCE = ("transformers.models.auto.modeling_auto", "transformers.generation", "datasets", "hf_comera", "peft")
IDENTITY = ("model_type", "torch", "transformers")
COLUMNS = (
    "model_type", "class", "kind", "verdict", "inputs", DENSE, *CHECKS, "stopped", "parameters", "stays_dense",
    "times_smaller", "dense_part", "dense_share", "dense_reason", "seconds", "torch", "transformers", "date",
)  # fmt: skip
Row = dict[str, object]


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, write rows as they come, then the page; 1 if something failed or the page is not up to date."""
    args = parse_arguments(argv)
    if args.check:
        return check_page(args.page, args.results)
    rows = [] if args.page_only else sweep(args)
    write_page(args.page, args.results)
    return int(any(row["verdict"] == "failed" for row in rows))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.architectures.sweep", description=DESCRIPTION, epilog=EPILOG, formatter_class=keep_lines
    )
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="as in config.json; default: all")
    parser.add_argument("--again", action="store_true", help="also where there is a row of these versions")
    parser.add_argument("--retry", action="store_true", help="also where there is one, but it says that nothing works")
    parser.add_argument("--seconds", type=positive_integer, default=120, help="for each; default %(default)s")
    parser.add_argument("--gib", type=positive_integer, default=10, help="of address space; default %(default)s")
    parser.add_argument("--page-only", action="store_true", help="sweep nothing, write the page from the rows")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    parser.add_argument("--results", type=Path, default=RESULTS / "sweep_architectures.csv", help="csv file of rows")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/architectures.md")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.model_types) - set(model_types()))
    if unknown:
        parser.error(f"{unknown[0]!r} is no model type of Transformers that is swept; mixtral, for example, is")
    return args


def sweep(args: argparse.Namespace) -> list[Row]:
    """Rows of the architectures that have none yet, written one by one."""
    answered = ("works", "nothing to compress") if args.retry else VERDICTS
    known = {tuple(row[name] for name in IDENTITY) for row in read_rows(args.results) if row["verdict"] in answered}
    wanted = [
        model_type
        for model_type in args.model_types or model_types()
        if args.again or (model_type, *versions().values()) not in known
    ]
    rows: list[Row] = []
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(wanted))
        try:
            for model_type in wanted:
                progress.update(task, description=model_type)
                rows.append(row_of(model_type, args.seconds, args.gib))
                replace_rows(args.results, [{name: rows[-1].get(name, "") for name in COLUMNS}], IDENTITY)
                write_page(args.page, args.results)
                progress.advance(task)
                if rows[-1]["verdict"] not in ("works", "nothing to compress"):
                    progress.print(f"{model_type}: {rows[-1]['verdict']} {_first_problem(rows[-1])}", markup=False)
        except KeyboardInterrupt:
            progress.print("Stopped. The same command goes on here.")
    return rows


def row_of(model_type: str, seconds: float, gib: float) -> Row:
    """The row of one architecture."""
    start = time.monotonic()
    row: Row = {"model_type": model_type}
    try:
        messages = call_limited(sweep_architecture, [model_type], seconds=seconds, gib=gib, imports=IMPORTED_ONCE)
    except Stopped as stopped:
        reason, messages = stopped.args
        row["stopped"] = " ".join(str(reason).split())[:240]
    for message in messages:
        row |= message
    row |= {"verdict": verdict_of({name: str(value) for name, value in row.items()}), **versions()}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return row | {"seconds": round(time.monotonic() - start, 1), "date": today}


def versions() -> dict[str, str]:
    """Of what a row depends on, besides the project itself."""
    return {name: importlib.metadata.version(name) for name in IDENTITY[1:]}


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of the csv file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_page(page: Path, results: Path) -> None:
    """Put the tables of the rows into the page."""
    page.write_text(with_tables(page.read_text(encoding="utf-8"), read_rows(results)), encoding="utf-8")


def check_page(page: Path, results: Path) -> int:
    """0 if the page has the tables of the rows."""
    text = page.read_text(encoding="utf-8")
    if with_tables(text, read_rows(results)) == text:
        return 0
    print(
        f"The tables of {page} are not those of {results}. Run: python -m benchmarks.architectures.sweep --page-only"
    )
    return 1


def _first_problem(row: Mapping[str, object]) -> str:
    texts = [str(row.get(name, "")) for name in ("stopped", DENSE, *CHECKS)]
    return next((text for text in texts if text.startswith(("failed", "stopped", "the process"))), "")


if __name__ == "__main__":
    sys.exit(main())
