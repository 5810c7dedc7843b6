"""Write the figures of speed in README.md and docs from the rows that the benchmarks left in benchmarks/results/.

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
from collections.abc import Callable, Iterable, Sequence
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
A pair of comments in a page holds what is written here:

    <!-- speed headline: begin -->     one sentence about the training step of
    <!-- speed headline: end -->       six encoders
    <!-- speed summary: begin -->      five rows for the first screen
    <!-- speed summary: end -->
    <!-- speed table: begin -->        every case that has a name
    <!-- speed table: end -->

All are of the processor with the newest rows (of one day: the last row of the first
csv file), with the number of threads and the environment with which most cases were
measured, and the newest row of a case. "Memory kept" are rows of the same with
--keep-freed-memory. "Median of rows", and each ratio of times in sentence and summary,
is that of all rows of the case with as many threads, from any processor, memory kept
or not. Rows that name a GPU are a table of their own below the first. Cases without a
name in NAMES of benchmarks/speed/readme_table.py are left out.
"""
Row = dict[str, str]
ROOT = RESULTS.parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "benchmarks.md")
KEPT = "MALLOC_KEPT=1"
FORMS = ("dense", "tensor_train")
HEADINGS = (
    "what", "dense", "tensor train", "times faster", "memory kept", "median of rows", "saved MB, dense",
    "saved MB, tensor train", "peak MB, dense", "peak MB, tensor train", "command",
)  # fmt: skip
BLOCK = re.compile(r"<!-- speed (?P<kind>\w+): begin -->\n.*?<!-- speed (?P=kind): end -->", re.DOTALL)
MARKER = re.compile(r"<!-- speed \w+: (?:begin|end) -->")
# The step of sentence and picture. Without dropout, which torch draws slowly on a CPU, both sides do the same.
STEP = "training step, six-encoder BERT, 32 x 128 tokens, no dropout"
ENCODER = "inference, six-encoder BERT, 8 x 128 tokens"
# Name of a case, what of its row is shown, and the words for it; none: the name.
SUMMARY = (
    (STEP, "time", ""),
    (STEP, "peak", "peak memory of that step"),
    (ENCODER, "time", ""),
    ("32 tokens of generation, GPT-2 of six layers, 8 prompts of 16", "time", ""),
    (ENCODER, "weights", "weights of the six-encoder BERT, float32"),
)


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
    """Write the figures into the pages, or compare the two."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.speed.readme_table", description=DESCRIPTION, formatter_class=keep_lines
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help="default: README.md and two of docs/")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the csv files; default: %(default)s")
    args = parser.parse_args(argv)
    measurements = read_results(args.results)
    texts = {page: page.read_text(encoding="utf-8") for page in args.pages}
    updated = {}
    for page, text in texts.items():
        try:
            updated[page] = with_figures(text, measurements)
        except ValueError as problem:
            parser.error(f"{page}: {problem}")
    stale = [str(page) for page in texts if updated[page] != texts[page]]
    if args.check and stale:
        sys.exit(f"Not the rows of {args.results}: {', '.join(stale)}. Run: python -m benchmarks.speed.readme_table")
    if not args.check:
        for page, text in updated.items():
            page.write_text(text, encoding="utf-8")


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


def with_figures(text: str, measurements: Sequence[Measurement]) -> str:
    """``text`` with all that stands between its comments written anew.

    Raises:
        ValueError: If comments are missing, unknown or not in pairs, or the sentence has no row to tell of.
    """
    kinds = [match["kind"] for match in BLOCK.finditer(text)]
    if len(MARKER.findall(text)) != 2 * len(kinds):
        raise ValueError("a 'speed' comment has no partner; every ': begin' needs an ': end' of the same name")
    if not kinds or set(kinds) - set(WRITERS):
        lines = "<!-- speed table: begin -->\n<!-- speed table: end -->"
        raise ValueError(f"found comments for {kinds}, needed are some of {list(WRITERS)}. Put in, say:\n{lines}")

    def renewed(match: re.Match[str]) -> str:
        begin, *_, end = match[0].splitlines()
        return "\n\n".join([begin, WRITERS[match["kind"]](measurements), end])

    return BLOCK.sub(renewed, text)


def headline(measurements: Sequence[Measurement]) -> str:
    """The sentence of the first line: parameters, speed and memory of one training step.

    Raises:
        ValueError: If that step was not measured.
    """
    step = shown_row(measurements, STEP)
    if step is None:
        raise ValueError(f"no row of {STEP!r}. Run: python -m benchmarks.speed.step --dropout 0")
    smaller = float(step.row["dense_parameters"]) / float(step.row["tensor_train_parameters"])
    memory = float(step.row["dense_peak_bytes"]) / float(step.row["tensor_train_peak_bytes"])
    faster, _ = median_ratio(step, measurements)
    return (
        f"Train Hugging Face Transformers in tensor-train form: a six-layer BERT has **{smaller:.0f} times fewer "
        f"parameters**,\ntrains **{_ratio(faster)} times as fast** and peaks at "
        f"**{_ratio(memory)} times less memory** "
        "on the same CPU, with three lines changed."
    )


def summary(measurements: Sequence[Measurement]) -> str:
    """Five rows for the first screen, and a sentence about the machine."""
    lines, rows, counts = [["what", "dense", "tensor train", "ratio"], ["---", "--:", "--:", "--:"]], [], []
    for name, figure, words in SUMMARY:
        measurement = shown_row(measurements, name)
        if measurement is None:
            continue
        row = measurement.row
        rows.append(measurement)
        if figure == "time":
            ratio, count = median_ratio(measurement, measurements)
            counts.append(count)
            shown = [_time(row, form) for form in FORMS]
        else:
            column = "bytes" if figure == "weights" else f"{figure}_bytes"
            dense, compressed = (float(row[f"{form}_{column}"]) for form in FORMS)
            ratio, shown = dense / compressed, [f"{_megabytes(size)} MB" for size in (dense, compressed)]
        lines.append([words or name.format_map(row), *shown, _ratio(ratio)])
    if not rows:
        return "Not measured."
    runs = f"{min(counts)} to {max(counts)} runs" if min(counts) < max(counts) else f"{max(counts)} runs"
    note = f"{_sentence(rows)} Ratios of times are medians of {runs}, since single runs differ by a quarter."
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), "", note])


def full_tables(measurements: Sequence[Measurement]) -> str:
    """Every case: a table of the processor, and one of the GPU."""
    on_gpu = [measurement for measurement in measurements if measurement.setting.gpu]
    on_processor = [measurement for measurement in measurements if not measurement.setting.gpu]
    parts = (
        table(rows_of_one_machine(on_processor), on_processor) or "Not measured.",
        table(rows_of_one_machine(on_gpu), on_gpu) or "On a GPU: not measured.",
    )
    return "\n\n".join(parts)


WRITERS: dict[str, Callable[[Sequence[Measurement]], str]] = {
    "headline": headline,
    "summary": summary,
    "table": full_tables,
}


def shown_row(measurements: Sequence[Measurement], name: str) -> Measurement | None:
    """The row of a case that a table of the processor shows, memory not kept if there is such a row."""
    rows = rows_of_one_machine(measurement for measurement in measurements if not measurement.setting.gpu)
    found = [row for row in rows if NAMES[row.case] == name]
    return min(found, key=lambda row: row.kept, default=None)


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
    row, (ratio, count) = shown.row, median_ratio(shown, measurements)
    return [
        NAMES[shown.case].format_map(row),
        *(_time(row, form) for form in FORMS),
        _ratio(float(plain.row["ratio"])) if plain else "",
        _ratio(float(kept.row["ratio"])) if kept else "",
        f"{_ratio(ratio)} of {count}",
        *(_megabytes(row.get(f"{form}_{kind}_bytes")) for kind in ("saved", "peak") for form in FORMS),
        f"`{_command(row['command'])}`",
    ]


def _time(row: Row, form: str) -> str:
    seconds = float(row[f"{form}_s"]) if row.get(f"{form}_s") else float(row[f"{form}_ms"]) / 1e3
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1e3, "ms")
    return f"{f'{value:#.3g}'.rstrip('.')} {unit}"


def median_ratio(shown: Measurement, measurements: Sequence[Measurement]) -> tuple[float, int]:
    """One pair of runs differs by a quarter between hours: what all of its rows say, and how many they are."""
    setting = shown.setting
    same = [
        m
        for m in measurements
        if m.case == shown.case and (m.setting.threads, m.setting.gpu) == (setting.threads, setting.gpu)
    ]
    return statistics.median(float(m.row["ratio"]) for m in same), len(same)


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"  # 0.96 is not 1.0


def _megabytes(num_bytes: str | float | None) -> str:
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
