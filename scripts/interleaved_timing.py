"""What the benchmark scripts share: candidates timed in turns, bytes saved for backward, figures as csv rows.

Candidates take turns within every round, in an order that rotates, so that a slow minute of the machine hits all of
them; a ratio is taken within each round, and medians over the rounds are reported.
"""

import argparse
import csv
import datetime
import gc
import importlib.metadata
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from freed_memory import keep_freed_memory
from hf_comera.memory import SavedBytes
from hf_comera.modules.halves_cache import note_parameter_edit

DENSE, TENSOR_TRAIN = "dense", "tensor train"
RESULTS = Path(__file__).resolve().parent / "results"
HOW_TO_READ = """\
How to read the figures: times are medians over the rounds. The ratio says how
many times faster the tensor train is: the median of the ratios within a round.
Saved bytes are those that autograd keeps from forward to backward, without
parameters; among them is what halves keep, which are built as after a step.
Peak bytes are weights, optimizer state and the most that a step adds, on a CPU
measured in a process of its own for each form, which hands back freed memory at
once (as in bench_memory.py); empty where the system does not say.

While other jobs use the cores, put OMP_WAIT_POLICY=passive before the command.
Threads that spin while they wait keep the others from working, and the many
small products of a tensor train suffer most. Such figures are rows of their own.
"""
MACHINE_IDENTITY = ("processor", "cores", "threads", "environment")
# Variables that change how fast torch runs on the same machine, by how their names begin.
SPEED_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "KMP_", "GOMP_", "OMP_PROC_BIND", "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class Timings:
    """Seconds of every candidate, one entry a round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds of one candidate."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """How many times faster ``name`` is than ``base``: the median of the ratios within each round."""
        pairs = zip(self.seconds[base], self.seconds[name], strict=True)
        return statistics.median(slow / fast for slow, fast in pairs)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measured case: a tensor-train candidate against its dense twin."""

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
    parser = argparse.ArgumentParser(description=description, epilog=how_to_read, formatter_class=keep_lines)
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
        help="only print. Otherwise figures go to scripts/results/ and replace those of the same case and machine.",
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


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """``names``, starting with another one each turn.

    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int, *, warmup: int = 2, label: str = ""
) -> Timings:
    """Run every candidate once a round, in rotating order, and keep the wall-clock seconds.

    Args:
        candidates: Functions without arguments, by name.
        rounds: Rounds that count.
        warmup: Rounds before them that do not.
        label: What the progress bar says.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    collector_was_on = gc.isenabled()
    gc.disable()  # as timeit does: a collection in the middle of one candidate would be charged to it
    try:
        with tqdm(total=(warmup + rounds) * len(candidates), desc=label, unit="run", leave=False) as progress:
            for turn in range(-warmup, rounds):
                gc.collect()
                for name in rotated(list(candidates), turn):
                    start = time.perf_counter()
                    candidates[name]()
                    elapsed = time.perf_counter() - start
                    if turn >= 0:
                        seconds[name].append(elapsed)
                    progress.update()
    finally:
        if collector_was_on:
            gc.enable()
    return Timings(seconds)


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


def machine() -> dict[str, str | int]:
    """Where, when, with what and by which command figures are measured."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SPEED_VARIABLES)]
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "environment": shlex.join(variables),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *map(without_folder, sys.argv[1:])]),
    }


def without_folder(word: str) -> str:
    """A file's name alone: its folder means nothing on other machines."""
    return Path(word).name if "/" in word else word


def replace_rows(path: Path, rows: Sequence[Mapping[str, object]], identity: Sequence[str]) -> None:
    """Write ``rows`` into the csv file ``path``; older rows stay unless they agree in all ``identity`` columns.

    A row that replaces another takes its place; the rest is appended. Columns that only older rows have are kept.
    """
    old: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            old = list(csv.DictReader(file))
    merged = {tuple(str(row.get(name, "")) for name in identity): row for row in (*old, *rows)}
    columns = dict.fromkeys(name for row in (*rows, *old) for name in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # an interrupted write must not cost the older figures
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged.values())
    part.replace(path)


def report(title: str, comparisons: Sequence[Comparison], *, save_as: str | None) -> None:
    """Print the table, and write the rows to ``scripts/results/<save_as>.csv`` unless ``save_as`` is None."""
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


def _processor() -> str:
    """The name of the processor; ``platform`` has only the family where Linux has more."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
