"""Write the tables of speed in README.md from the rows that the benchmarks left in benchmarks/results/.

    python -m benchmarks.speed.readme_table
    python -m benchmarks.speed.readme_table --check

`--help` says which rows are taken.
"""

import argparse
import csv
import itertools
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from benchmarks.harness.timing import RESULTS

_EMBEDDING = "embedding 30522 x 768 with optimizer"
_ENCODER = "inference, six-encoder BERT"
_GENERATION = "32 tokens of generation, GPT-2 of six layers"
# File, then the columns that tell its cases apart.
COLUMNS = {
    "bench_step": (
        "model",
        "tokens",
        "dtype",
        "dropout",
        "optimizer",
        "graphs",
        "kernels",
        "compiled",
        "padded",
        "dense_block",
        "embedding_width",
    ),
    "bench_linear": ("shape", "dtype", "rows"),
    "bench_lookup": ("batch", "ids"),
    "bench_inference": ("model", "tokens", "dtype"),
}
DESCRIPTION = """\
Every pair of comments in the README holds a table of one machine:

    <!-- speed table: begin -->        the processor with the newest rows (of one
    <!-- speed table: end -->          day: the last row of the first csv file)
    <!-- speed table AMD: begin -->    a processor with "AMD" in its name, cases
    <!-- speed table AMD: end -->      that the first table has not

A table has the number of threads and the environment with which most cases were
measured, and the newest row of a case. "Memory kept" are rows of the same with
--keep-freed-memory. "Median of rows" is that of all rows of the case with as many
threads, from any processor, memory kept or not. Rows that name a GPU are a table of their own in the first
pair. Cases without a name in NAMES of benchmarks/speed/readme_table.py are left
out.
"""
Row = dict[str, str]
README = RESULTS.parents[1] / "README.md"
KEPT = "MALLOC_KEPT=1"
FORMS = ("dense", "tensor_train")
HEADINGS = (
    "what", "dense", "tensor train", "times faster", "memory kept", "median of rows", "saved MB, dense",
    "saved MB, tensor train", "peak MB, dense", "peak MB, tensor train", "command",
)  # fmt: skip
BLOCK = re.compile(r"<!-- speed table(?P<name>[^:\n]*): begin -->\n.*?<!-- speed table(?P=name): end -->", re.DOTALL)
MARKER = re.compile(r"<!-- speed table[^:\n]*: (?:begin|end) -->")


def _step_names() -> dict[tuple[str, ...], str]:
    """Every case of benchmarks/speed/step.py, the usual settings first."""
    models = {
        ("bert-6x768", "32x128"): "six-encoder BERT, 32 x 128 tokens",
        ("bert-6x768", "128x128"): "six-encoder BERT, 128 x 128 tokens",
        ("bert-24x1024", "16x512"): "BERT of 24 encoders 1024 wide, 16 x 512 tokens",
        ("roberta-12x768", "8x512"): "masked RoBERTa of 12 layers, 8 x 512 tokens",
        ("roberta-4x768", "8x512"): "masked RoBERTa of 4 layers, 8 x 512 tokens",
        ("roberta-4x768", "8x128"): "masked RoBERTa of 4 layers, 8 x 128 tokens",
        ("gpt2-12x768", "8x512"): "GPT-2 of 12 layers, 8 x 512 tokens",
        ("gpt2-6x768", "8x512"): "GPT-2 of 6 layers, 8 x 512 tokens",
        ("llama-8x1024", "1x2048"): "Llama of 8 layers 1024 wide, 2,048 tokens",
        ("llama-1x4096", "2x2048"): "decoder block 4096 wide, 2 x 2048 tokens",
    }
    settings = (
        {"tt_muon": "", "adamw": ", AdamW"},
        {"fp32": "", "tf32": ", tf32", "bf16": ", bf16 autocast"},
        {"0.1": ", dropout 0.1", "0.0": ", no dropout"},
        {"": "", "yes": ", CUDA graphs"},
        {"": "", "yes": ", our kernels"},
        {"": "", "yes": ", compiled"},
        {"": "", "yes": ", padded rows and a mask"},
        {"": "", "yes": ", head and loss as one block on both sides"},
        {"": "", **{width: f", tables {width} wide" for width in ("64", "128", "256")}},
    )
    names = {}
    for parts in itertools.product(models.items(), *(setting.items() for setting in settings)):
        (model, optimizer, dtype, dropout, *launches), (what, with_, in_, dropped, *how) = zip(*parts, strict=True)
        case = ("bench_step", *model, dtype, dropout, optimizer, *launches)
        names[case] = f"training step, {what}{dropped}{in_}{with_}{''.join(how)}"
    return names


# What a case is called, in the order of the table. Braces take a column of the row.
NAMES = {
    **_step_names(),
    ("bench_linear", "768x768", "fp32", "4096"): "linear 768 -> 768, forward and backward, 4096 rows",
    ("bench_linear", "768x3072", "fp32", "4096"): "linear 768 -> 3072, forward and backward, 4096 rows",
    ("bench_linear", "3072x768", "fp32", "4096"): "linear 3072 -> 768, forward and backward, 4096 rows",
    ("bench_linear", "768x768", "bf16", "4096"): "linear 768 -> 768, forward and backward, 4096 rows, bf16",
    ("bench_linear", "768x3072", "bf16", "4096"): "linear 768 -> 3072, forward and backward, 4096 rows, bf16",
    ("bench_linear", "3072x768", "bf16", "4096"): "linear 3072 -> 768, forward and backward, 4096 rows, bf16",
    ("bench_lookup", "text", "4096"): f"{_EMBEDDING}, {{distinct_ids}} distinct ids",
    ("bench_lookup", "padded", "4096"): f"{_EMBEDDING}, padded batch, {{distinct_ids}} distinct ids",
    ("bench_inference", "bert-6x768", "1x16", "fp32"): f"{_ENCODER}, 1 x 16 tokens",
    ("bench_inference", "bert-6x768", "1x128", "fp32"): f"{_ENCODER}, 1 x 128 tokens",
    ("bench_inference", "bert-6x768", "8x128", "fp32"): f"{_ENCODER}, 8 x 128 tokens",
    ("bench_inference", "gpt2-6x768", "1x16+32", "fp32"): f"{_GENERATION}, 1 prompt of 16",
    ("bench_inference", "gpt2-6x768", "8x16+32", "fp32"): f"{_GENERATION}, 8 prompts of 16",
    ("bench_inference", "gpt2-6x768", "8x512+32", "fp32"): f"{_GENERATION}, 8 prompts of 512",
    ("bench_inference", "bert-6x768", "1x16", "bf16"): f"{_ENCODER}, 1 x 16 tokens, bf16",
    ("bench_inference", "bert-6x768", "1x128", "bf16"): f"{_ENCODER}, 1 x 128 tokens, bf16",
    ("bench_inference", "bert-6x768", "8x128", "bf16"): f"{_ENCODER}, 8 x 128 tokens, bf16",
    ("bench_inference", "gpt2-6x768", "1x16+32", "bf16"): f"{_GENERATION}, 1 prompt of 16, bf16",
    ("bench_inference", "gpt2-6x768", "8x16+32", "bf16"): f"{_GENERATION}, 8 prompts of 16, bf16",
}


class Setting(NamedTuple):
    """What the rows of one table share: the machine, and how it was used."""

    processor: str
    cores: str
    gpu: str
    threads: str
    environment: str
    """Variables that change the speed, but not whether memory was kept."""


@dataclass(frozen=True)
class Measurement:
    """One row of a csv file."""

    case: tuple[str, ...]
    """A key of ``NAMES``: file and case columns."""
    setting: Setting
    kept: bool
    """Freed memory was kept."""
    age: tuple[str, int, int]
    """Newer rows are larger: date; of one day, rows of earlier files; of one file, later rows."""
    row: Row

    @property
    def date(self) -> str:
        """As the row has it."""
        return self.row["date"]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables into the README, or compare them with it."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.speed.readme_table", description=DESCRIPTION, formatter_class=keep_lines
    )
    parser.add_argument("--processor", metavar="NAME", help="only the table with this name in its comments, e.g. AMD")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README is not up to date")
    parser.add_argument("--readme", type=Path, default=README, help="default: README.md of the repository")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the csv files; default: %(default)s")
    args = parser.parse_args(argv)
    text = args.readme.read_text(encoding="utf-8")
    try:
        updated = with_tables(text, read_results(args.results), args.processor)
    except ValueError as problem:
        parser.error(f"{args.readme}: {problem}")
    if args.check and updated != text:
        again = shlex.join(
            [
                "python",
                "-m",
                "benchmarks.speed.readme_table",
                *(["--processor", args.processor] * bool(args.processor)),
            ]
        )
        sys.exit(f"The tables of speed in {args.readme} are not those of {args.results}. Run: {again}")
    if not args.check:
        args.readme.write_text(updated, encoding="utf-8")


def read_results(folder: Path) -> list[Measurement]:
    """All rows that have a name; says on stderr which have none. Files that are missing have no rows."""
    measurements = []
    for number, (stem, columns) in enumerate(COLUMNS.items()):
        path = folder / f"{stem}.csv"
        if not path.exists():
            continue
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for line, row in enumerate(rows):
            case = (stem, *(row.get(column) or "" for column in columns))
            if case in NAMES:
                measurements.append(_measurement(case, row, (row["date"], -number, line)))
            else:
                print(f"{path.name}: no name in NAMES for {case[1:]}, left out", file=sys.stderr)
    return measurements


def with_tables(text: str, measurements: Sequence[Measurement], only: str | None = None) -> str:
    """``text`` with new tables between its markers; those of one processor alone if ``only`` is given.

    Raises:
        ValueError: If markers are missing or not in pairs, or a named processor has no rows.
    """
    names = [match["name"].strip() for match in BLOCK.finditer(text)]
    if len(MARKER.findall(text)) != 2 * len(names):
        raise ValueError("a 'speed table' comment has no partner; every ': begin' needs an ': end' of the same name")
    if (only or "") not in names:
        name = f" {only}" if only else ""
        lines = f"<!-- speed table{name}: begin -->\n<!-- speed table{name}: end -->"
        raise ValueError(f"no place for the table; found names {names}. Put in these two lines:\n{lines}")
    on_processor = [measurement for measurement in measurements if not measurement.setting.gpu]
    first = rows_of_one_machine(on_processor)

    def renewed(match: re.Match[str]) -> str:
        name = match["name"].strip()
        if only not in (None, name):
            return match[0]
        if name:
            parts = [named_table(on_processor, name, first)]
        else:
            on_gpu = [measurement for measurement in measurements if measurement.setting.gpu]
            newest = rows_of_one_machine(on_gpu)
            parts = [
                table(first, on_processor) or "Not measured.",
                table(newest, on_gpu) or "On a GPU: not measured.",
            ]
        begin, *_, end = match[0].splitlines()
        return "\n\n".join([begin, *parts, end])

    return BLOCK.sub(renewed, text)


def named_table(measurements: Sequence[Measurement], name: str, first: Sequence[Measurement]) -> str:
    """The table of a processor with ``name`` in its name, without the cases of the first table.

    Raises:
        ValueError: If there is no such processor.
    """
    rows = rows_of_one_machine(m for m in measurements if name in m.setting.processor)
    if not rows:
        found = sorted({m.setting.processor for m in measurements})
        raise ValueError(f"processor {name!r} has no rows; there are rows of {found}")
    known = {m.case for m in first}
    return table([m for m in rows if m.case not in known], measurements) or "All of its cases are in the table above."


def rows_of_one_machine(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Rows of the newest machine, in the setting with most cases, the newest of several; none if there are none."""
    rows = sorted(measurements, key=lambda m: m.age)
    if not rows:
        return []
    newest = rows[-1].setting
    rows = [m for m in rows if m.setting[:3] == newest[:3]]
    by_setting: dict[Setting, list[Measurement]] = {}
    for measurement in rows:
        by_setting.setdefault(measurement.setting, []).append(measurement)
    chosen = max(by_setting.values(), key=lambda group: (len({m.case for m in group}), group[-1].age))
    return list({(m.case, m.kept): m for m in chosen}.values())


def table(rows: Sequence[Measurement], measurements: Sequence[Measurement]) -> str:
    """A sentence about the machine, and the rows in Markdown; empty without rows.

    Args:
        rows: Those of one machine.
        measurements: Those of all machines that the medians are of.
    """
    if not rows:
        return ""
    by_case: dict[tuple[str, ...], dict[bool, Measurement]] = {}
    for measurement in sorted(rows, key=lambda m: list(NAMES).index(m.case)):
        by_case.setdefault(measurement.case, {})[measurement.kept] = measurement
    rule = ["---", *["--:"] * (len(HEADINGS) - 2), "---"]
    lines = [HEADINGS, rule, *(_cells(found.get(False), found.get(True), measurements) for found in by_case.values())]
    return "\n".join([_sentence(rows), "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _measurement(case: tuple[str, ...], row: Row, age: tuple[str, int, int]) -> Measurement:
    variables = shlex.split(row.get("environment") or "")
    others = shlex.join(variable for variable in variables if variable != KEPT)
    setting = Setting(row["processor"], row["cores"], row.get("gpu") or "", row["threads"], others)
    return Measurement(case, setting, KEPT in variables, age, row)


def _sentence(rows: Sequence[Measurement]) -> str:
    setting, dates = rows[0].setting, sorted(m.date for m in rows)
    versions = " and ".join(sorted({m.row["torch"] for m in rows}))
    parts = [
        f"{setting.gpu} beside {setting.processor}" if setting.gpu else setting.processor,
        f"cores: {setting.cores}",
        f"threads: {setting.threads}",
        f"`{setting.environment}`" if setting.environment else "",
        f"torch {versions}",
        dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
    ]
    return f"Measured on {', '.join(filter(None, parts))}."


def _cells(plain: Measurement | None, kept: Measurement | None, measurements: Sequence[Measurement]) -> list[str]:
    shown = plain or kept
    assert shown is not None
    row = shown.row
    return [
        NAMES[shown.case].format_map(row),
        *(_time(row, form) for form in FORMS),
        _ratio(float(plain.row["ratio"])) if plain else "",
        _ratio(float(kept.row["ratio"])) if kept else "",
        _median(shown, measurements),
        *(_megabytes(row.get(f"{form}_{kind}_bytes")) for kind in ("saved", "peak") for form in FORMS),
        f"`{_command(row['command'])}`",
    ]


def _time(row: Row, form: str) -> str:
    seconds = float(row[f"{form}_s"]) if row.get(f"{form}_s") else float(row[f"{form}_ms"]) / 1e3
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1e3, "ms")
    return f"{f'{value:#.3g}'.rstrip('.')} {unit}"


def _median(shown: Measurement, measurements: Sequence[Measurement]) -> str:
    """One pair of runs differs by a quarter between hours: what all of its rows say, and how many they are."""
    same = [m for m in measurements if m.case == shown.case and m.setting.threads == shown.setting.threads]
    return f"{_ratio(statistics.median(float(m.row['ratio']) for m in same))} of {len(same)}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"  # 0.96 is not 1.0


def _megabytes(num_bytes: str | None) -> str:
    if not num_bytes:
        return ""
    size = float(num_bytes) / 1e6
    return f"{size:,.0f}" if size >= 9.95 else f"{size:.2g}"


def _command(command: str) -> str:
    """The benchmark and its options; files without folders, which mean nothing on other machines."""
    words = [word.rpartition("=") for word in shlex.split(command.removeprefix("python -m benchmarks."))]
    names = (option + equals + PurePath(value).name for option, equals, value in words)
    return shlex.join(names).replace("|", "\\|")


if __name__ == "__main__":
    main()
