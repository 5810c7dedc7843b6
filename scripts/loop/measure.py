"""What figures come from: candidates timed in turns, the machine that they are of, and rows of a csv file.

Candidates take turns within every round, in an order that rotates, so that a slow minute of the machine hits all of
them; a ratio is taken within each round, and medians over the rounds are reported.
"""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

DENSE, TENSOR_TRAIN = "dense", "tensor train"
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
        "command": shlex.join([*program(sys.argv[0]), *map(without_folder, sys.argv[1:])]),
    }


def program(path: str) -> list[str]:
    """The words that run a file of this project from its root: a script by its path, a benchmark as a module.

    >>> program("/home/someone/benchmarks/speed/step.py"), program("scripts/train_mnli.py")
    (['python', '-m', 'benchmarks.speed.step'], ['python', 'scripts/train_mnli.py'])
    """
    parts = Path(path).with_suffix("").parts
    if "benchmarks" not in parts:
        return ["python", f"scripts/{Path(path).name}"]
    return ["python", "-m", ".".join(parts[len(parts) - 1 - parts[::-1].index("benchmarks") :])]


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


def _processor() -> str:
    """The name of the processor; ``platform`` has only the family where Linux has more."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
