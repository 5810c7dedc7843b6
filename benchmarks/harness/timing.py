"""What the benchmarks share: their options, bytes saved for backward, comparisons as tables and as csv rows.

Candidates are timed in turns (:func:`loop.measure.time_interleaved`).
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_comera.memory import SavedBytes
from hf_comera.modules.halves_cache import note_parameter_edit
from loop.measure import DENSE, MACHINE_IDENTITY, TENSOR_TRAIN, Timings, machine, program, replace_rows
from loop.memory import keep_freed_memory

RESULTS = Path(__file__).resolve().parents[1] / "results"
HOW_TO_READ = """\
How to read the figures: times are medians over the rounds. The ratio says how
many times faster the tensor train is: the median of the ratios within a round.
Saved bytes are those that autograd keeps from forward to backward, without
parameters; among them is what halves keep, which are built as after a step.
Peak bytes are weights, optimizer state and the most that a step adds, on a CPU
measured in a process of its own for each form, which hands back freed memory at
once (as in benchmarks.memory); empty where the system does not say.

While other jobs use the cores, put OMP_WAIT_POLICY=passive before the command.
Threads that spin while they wait keep the others from working, and the many
small products of a tensor train suffer most. Such figures are rows of their own.
"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measured case: a tensor-train candidate against its dense baseline."""

    case: dict[str, str | int | float]
    """What was measured; together with the machine it names the row of the csv file."""
    timings: Timings
    saved_bytes: dict[str, int] | None
    """Bytes saved for backward by each of the two; None where nothing goes backward."""
    promised: float | None
    """Speed-up that the project promises for this case, if it does."""
    unit: str = "ms"
    """``"ms"`` or ``"s"``."""
    extra: dict[str, str | int | float] = field(default_factory=dict)
    peak_bytes: dict[str, int | None] = field(default_factory=dict)
    """The most memory that each of the two takes; None where the system does not say."""

    def row(self) -> dict[str, str | int | float]:
        """All figures under the names of the csv columns, without the machine."""
        scale = {"s": 1.0, "ms": 1e3}[self.unit]
        return {
            **self.case,
            f"dense_{self.unit}": round(self.timings.median(DENSE) * scale, 3),
            f"tensor_train_{self.unit}": round(self.timings.median(TENSOR_TRAIN) * scale, 3),
            "ratio": round(self.timings.ratio(TENSOR_TRAIN, DENSE), 2),
            "promised_ratio": "" if self.promised is None else self.promised,
            **self._bytes(),
            **self.extra,
            "rounds": len(self.timings.seconds[DENSE]),
        }

    def _bytes(self) -> dict[str, str | int]:
        kinds: dict[str, Mapping[str, int | None]] = {"saved": self.saved_bytes or {}, "peak": self.peak_bytes}
        found = ((kind, form, sizes[form]) for kind, sizes in kinds.items() for form in (DENSE, TENSOR_TRAIN) if sizes)
        return {f"{form.replace(' ', '_')}_{kind}_bytes": "" if size is None else size for kind, form, size in found}


def benchmark_parser(description: str, rounds: int, *, how_to_read: str = HOW_TO_READ) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; ``rounds`` is the default."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    prog = " ".join(program(sys.argv[0]))
    parser = argparse.ArgumentParser(prog, description=description, epilog=how_to_read, formatter_class=keep_lines)
    parser.add_argument(
        "--rounds",
        type=positive_integer,
        default=rounds,
        help=f"times each candidate is measured, after two runs that do not count; default {rounds}. "
        "For a quick look take 2, with --no-save.",
    )
    parser.add_argument(
        "--threads",
        type=positive_integer,
        default=os.cpu_count() or 1,
        help="torch threads; default: all cores. Figures with another number of threads are rows of their own.",
    )
    parser.add_argument(
        "--keep-freed-memory",
        action=_KeepFreedMemory,
        nargs=0,
        help="let both candidates reuse freed memory (glibc): large outputs are otherwise fresh, and page faults "
        "cost more than thin products. Such figures are rows of their own.",
    )
    parser.add_argument(
        "--no-save",
        "--no_save",
        action="store_true",
        help="only print. Otherwise figures go to benchmarks/results/ and replace those of the same case and machine.",
    )
    return parser


class _KeepFreedMemory(argparse.Action):
    """Tells the C library at once, before anything is allocated, and notes it for the rows."""

    def __call__(self, *_: object) -> None:
        if not keep_freed_memory():
            raise SystemExit("--keep-freed-memory needs glibc; leave it out here.")
        os.environ["MALLOC_KEPT"] = "1"  # begins like glibc's own variables, which name rows already


def positive_integer(text: str) -> int:
    """An argparse type."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer; 2, for example, is")
    return value


def saved_for_backward(compute: Callable[[], object], excluded: Iterable[Tensor]) -> int:
    """Bytes that are allocated in ``compute()`` and kept alive for its backward, each storage counted once and whole.

    Halves are built anew, as after an optimizer's step.

    Args:
        compute: A forward pass; of what it returns the graph alone is held until the count is made.
        excluded: Tensors that are not counted.
    """
    note_parameter_edit()
    with SavedBytes(excluded) as saved:
        graph = getattr(compute(), "grad_fn", None)
    del graph
    return saved.total


def check_agreement(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Refuse to time two candidates that compute different things.

    Raises:
        RuntimeError: If the relative Frobenius error of ``actual`` is above ``tolerance``, or not a number.
    """
    expected = expected.detach().double()
    error = float((actual.detach().double() - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise RuntimeError(
            f"{what}: what is compared differs by {error:.2g} (relative), more than {tolerance:.2g}. "
            "Timings of wrong results mean nothing; nothing was measured."
        )


def report(title: str, comparisons: Sequence[Comparison], *, save_as: str | None) -> None:
    """Print the table, and write the rows to ``benchmarks/results/<save_as>.csv`` unless ``save_as`` is None."""
    console, here = Console(), machine()
    rows = [comparison.row() for comparison in comparisons]
    table = Table(show_header=False)
    for name in rows[0]:
        values = [row[name] for row in rows]
        table.add_row(name.replace("_", " "), *(v if isinstance(v, str) else f"{v:,}" for v in values))
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(title, table)
    console.print(f"{here['processor']}, threads: {here['threads']}, torch {here['torch']}, {here['date']}")
    if save_as is not None:
        path = RESULTS / f"{save_as}.csv"
        replace_rows(path, [{**row, **here} for row in rows], [*comparisons[0].case, *MACHINE_IDENTITY])
        console.print(f"Written to {path}", soft_wrap=True)
