"""The results of the GPU report as files: one page, all figures, and rows like those of benchmarks/results/."""

import csv
import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import STEPS
from benchmarks.gpu.verdicts import judge
from benchmarks.kernels.decoder_block import decoder_block

__all__ = ["KERNEL_ROWS", "PAGE", "REHEARSED", "STEP_ROWS", "write_results"]

PAGE, FIGURES, KERNEL_ROWS, STEP_ROWS = "report.md", "report.csv", "bench_kernels.csv", "bench_step.csv"
REHEARSED = "**REHEARSAL ON A CPU, with tiny models and emulated kernels: no figure here says anything about a GPU.**"
MOST_FAILURES = 40
OWN_COLUMNS = ("step", "treatment", "dense_step_ms", "tensor_train_step_ms")
"""Columns that the rows of benchmarks/results/ do not have."""
Row = dict[str, Any]


def write_results(journal: Journal, folder: Path) -> list[str]:
    """Write everything anew; rows of a rehearsal do not look like those of benchmarks/results/, and never get there.

    Returns:
        Names of the files.
    """
    header, rows = journal.header(), journal.rows()
    assert header is not None
    note = {"rehearsal": "REHEARSAL"} if header["rehearsal"] else {}
    _write_csv(folder / FIGURES, [note | row for row in rows])
    names = [PAGE, FIGURES]
    if not header["rehearsal"]:
        kernels = [_without(row) for row in rows if "ratio_to_torch" in row and "format" in row]
        _write_csv(folder / KERNEL_ROWS, [*kernels, *decoder_block(kernels)])
        _write_csv(folder / STEP_ROWS, [_without(row) for row in rows if "dense_step_ms" in row])
        names += [KERNEL_ROWS, STEP_ROWS]
    (folder / PAGE).write_text("\n\n".join(_sections(journal, header)) + "\n", encoding="utf-8")
    return names


def _without(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in OWN_COLUMNS}


def _sections(journal: Journal, header: Row) -> Iterable[str]:
    devices = "; ".join(f"{d['name']}, {'.'.join(map(str, d['capability']))}" for d in header["devices"])
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in header["versions"].items())
    day = datetime.datetime.fromtimestamp(header["time"], datetime.timezone.utc).date().isoformat()
    yield "# What a GPU says"
    if header["rehearsal"]:
        yield REHEARSED
    yield f"{devices}. {versions}. {day}. {journal.spent():.0f} seconds so far. Written by `make gpu-report`."
    yield "## Verdicts\n\n" + _table(["what", "verdict", "why"], judge(journal))
    yield "## Steps\n\n" + _table(
        ["step", "state", "seconds", "cases"], [_state(journal, step.name) for step in STEPS]
    )
    yield from _failures(journal)
    rows = journal.rows()
    for title, marker, columns in TABLES:
        chosen = [[_shown(row.get(column, "")) for column in columns] for row in rows if marker in row]
        if chosen:
            yield f"## {title}\n\n" + _table([column.replace("_", " ") for column in columns], chosen)
    yield _digests(journal)


TABLES = (
    ("Machine", "found", ("what", "found")),
    ("compute-sanitizer: findings in our kernels, and in others", "tool", ("tool", "ours", "others", "examples")),
    (
        "Training steps, milliseconds and peak bytes",
        "dense_step_ms",
        ("step", "treatment", "dense_step_ms", "tensor_train_step_ms", "ratio", "dense_peak_bytes",
         "tensor_train_peak_bytes"),
    ),
    (
        "Models and losses of the scripts",
        "script",
        ("script", "dtype", "way", "dropout", "step_ms", "difference", "replays", "not_in_graphs"),
    ),
    ("Speed of light", "terabytes_per_s", ("terabytes_per_s", "bf16_tflops", "tf32_tflops", "fp32_tflops")),
    (
        "Kernels, microseconds",
        "ratio_to_torch",
        ("op", "format", "tokens", "layers", "in", "out", "rank", "dense_us", "torch_us", "kernel_us",
         "ratio_to_dense", "ratio_to_torch", "of_floor"),
    ),
    ("FP8 linears, microseconds", "bf16_us", ("what", "bf16_us", "fp8_us", "ratio", "bf16_peak_bytes",
                                              "fp8_peak_bytes")),
    ("Where plain steps with kernels spend their time", "us_a_step", ("step", "kernel", "calls_a_step", "us_a_step")),
)  # fmt: skip
"""Title, the column that the rows of a table have and others have not, and what is shown."""


def _state(journal: Journal, name: str) -> Sequence[object]:
    closed = journal.closed(name)
    outcomes = [event["outcome"] for event in journal.outcomes(name).values()]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    state = f"{closed['how']} {closed['note']}".strip() if closed else "not done"
    return name, state, f"{journal.spent(name):.0f}", counts


def _failures(journal: Journal) -> Iterable[str]:
    """Everything that failed or died, with its reason."""
    found = [
        (step.name, case, event["outcome"], event.get("note", ""))
        for step in STEPS
        for case, event in journal.outcomes(step.name).items()
        if event["outcome"] in ("failed", "died", "skipped")
    ]
    for title, wanted in (("Failed or died", ("failed", "died")), ("Skipped", ("skipped",))):
        chosen = [row for row in found if row[2] in wanted]
        if chosen:
            more = f"\n\n... and {len(chosen) - MOST_FAILURES} more." if len(chosen) > MOST_FAILURES else ""
            yield f"## {title}\n\n" + _table(["step", "case", "outcome", "why"], chosen[:MOST_FAILURES]) + more


def _digests(journal: Journal) -> str:
    digests = {event["step"]: event["sources"] for event in journal.events() if event["event"] == "started"}
    if len(set(digests.values())) < 2:
        return f"All of it is of one state of the sources ({next(iter(digests.values()), 'none')})."
    return "**Steps are of different sources:** " + ", ".join(f"{step} {digest}" for step, digest in digests.items())


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return "" if value is None or value == {} else str(value)


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for row in rows:
        cells = (" ".join(str(cell).replace("|", "/").split()) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
