"""The tables of ``docs/architectures.md``, made from the rows of ``benchmarks/architectures/sweep.py``."""

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["PAGE", "VERDICTS", "verdict_of", "with_tables"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
BLOCK = re.compile(r"(<!-- architectures: begin -->\n).*?(<!-- architectures: end -->)", re.DOTALL)
FAILED, NOTHING, NOT_APPLICABLE = "failed: ", "nothing to compress", "does not apply: "
CHECKS = ("scratch", "backward", "reload", "policy", "merge", "full_rank", "generation")
VERDICTS = {
    "works": "every check that applies passes",
    "failed": "a check fails",
    NOTHING: "no layer is exactly a Linear, Conv1D or Embedding; `get_comera_model` says so and lists the layers",
    "stopped": "past the limit of time or memory",
    "dense does not run": "the small dense model does not run here: nothing to compare with",
}
"""In the order of the page."""
Row = Mapping[str, str]


def verdict_of(row: Row) -> str:
    """A key of ``VERDICTS``, from the outcomes of the checks."""
    outcomes = [row.get(name, "") for name in CHECKS]
    if row.get("dense", "").startswith(FAILED):
        return "dense does not run"
    if any(outcome.startswith(FAILED) for outcome in outcomes):
        return "failed"
    if row.get("stopped"):
        return "stopped"
    return NOTHING if NOTHING in outcomes else "works"


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """``text`` with new tables between its two comments, from the rows of the newest versions.

    Raises:
        ValueError: If ``text`` has not the two comments.
    """
    if not BLOCK.search(text):
        raise ValueError(
            "the page needs the lines <!-- architectures: begin --> and <!-- architectures: end -->, between which "
            "the tables are written"
        )
    tables = _tables(rows) if rows else "Not measured.\n"
    return BLOCK.sub(lambda match: f"{match[1]}{tables}{match[2]}", text, count=1)


def _tables(rows: Sequence[Row]) -> str:
    newest = max(rows, key=lambda row: row["date"])
    shown = sorted(
        (row for row in rows if all(row[name] == newest[name] for name in ("torch", "transformers"))),
        key=lambda row: row["model_type"].lower(),
    )
    versions = f"Transformers {newest['transformers']}, torch {newest['torch']}"
    parts = [
        f"{len(shown)} architectures; {versions}, {_dates(shown)}.",
        _verdicts(shown),
        *_failures(shown),
        "## What stays dense\n",
        _shares(shown),
        "## All that were compared\n",
        _compared(shown),
        "## Not compared\n",
        _not_compared(shown),
    ]
    return "\n" + "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts) + "\n"


def _dates(rows: Sequence[Row]) -> str:
    dates = sorted({row["date"] for row in rows})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _verdicts(rows: Sequence[Row]) -> str:
    counts = Counter(row["verdict"] for row in rows)
    lines = [(verdict, meaning, str(counts[verdict])) for verdict, meaning in VERDICTS.items()]
    return _table(("result", "which is", "architectures"), lines, right=(2,))


def _failures(rows: Sequence[Row]) -> list[str]:
    lines = [
        (f"`{row['model_type']}`", name, row[name].removeprefix(FAILED))
        for row in rows
        for name in CHECKS
        if row[name].startswith(FAILED) and row["verdict"] == "failed"
    ]
    return ["## Failures\n", _table(("architecture", "check", "what was seen"), lines)] if lines else []


def _shares(rows: Sequence[Row]) -> str:
    shares = [(float(row["stays_dense"]), row) for row in rows if row["stays_dense"] and row["verdict"] == "works"]
    if not shares:
        return "Not measured."
    half = [row for share, row in shares if share > 0.5]
    reasons = Counter(_kind_of_reason(row["dense_reason"]) for row in half)
    median = statistics.median(share for share, _ in shares)
    return (
        f"Of {len(shares)} architectures that work, the median model keeps {median:.0%} of its parameters dense, and "
        f"{len(half)} keep more than half. The largest dense part of these is:\n\n"
    ) + _table(("largest dense part", "architectures"), [(r, str(n)) for r, n in reasons.most_common()], right=(1,))


def _kind_of_reason(reason: str) -> str:
    """The reason without the name of the class.

    >>> _kind_of_reason("3-D parameter of MixtralExperts"), _kind_of_reason("convolution (Conv2d)")
    ('3-D parameter', 'convolution')
    """
    return re.sub(r" of \w+$| \(.*\)$|^\w+, a ", "", reason)


def _compared(rows: Sequence[Row]) -> str:
    lines = [
        (
            f"`{row['model_type']}`",
            row["class"],
            row["verdict"],
            _share(row["stays_dense"]),
            f"{row['times_smaller']}x" if row["times_smaller"] else "",
            f"`{row['dense_part']}` ({_share(row['dense_share'])})" if row["dense_part"] else "",
            row["dense_reason"],
            ", ".join(name for name in CHECKS if row[name].startswith(NOT_APPLICABLE)),
        )
        for row in rows
        if row["verdict"] not in ("dense does not run", "stopped")
    ]
    headings = ("architecture", "class", "result", "stays dense", "model smaller", "largest dense part", "why",
                "checks that do not apply")  # fmt: skip
    return _table(headings, lines, right=(3, 4))


def _share(text: str) -> str:
    return f"{float(text):.1%}" if text else ""


def _not_compared(rows: Sequence[Row]) -> str:
    lines = [
        (f"`{row['model_type']}`", row["class"], row["stopped"] or row["dense"].removeprefix(FAILED)[:160])
        for row in rows
        if row["verdict"] in ("dense does not run", "stopped")
    ]
    return _table(("architecture", "class", "what was seen"), lines) if lines else "None.\n"


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    rule = ["--:" if number in right else "---" for number in range(len(headings))]
    cells = [headings, rule, *([cell.replace("|", "/") for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"
