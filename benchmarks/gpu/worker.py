"""The process of one step of the GPU report: runs its cases in turn and writes each into the journal.

    python -m benchmarks.gpu.worker JOURNAL STEP UNTIL PARENT

The report starts it. It ends by itself before a case for which the time is too short, when the device no longer
answers, and when the process that started it is gone.
"""

import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import Step, find_step

__all__ = ["KINDS", "SICK", "Cases", "SkippedError"]

ORPHANED, SICK = 70, 71
"""Exit status: the parent is gone; the device no longer answers."""
KINDS = {
    "environment": "benchmarks.gpu.environment",
    "tests": "benchmarks.gpu.tests",
    "kernels": "benchmarks.gpu.kernels",
    "losses": "benchmarks.gpu.losses",
    "training": "benchmarks.gpu.training",
    "optimizers": "benchmarks.gpu.optimizers",
    "fp8": "benchmarks.gpu.fp8",
}
"""The file that runs the cases of each kind of step, by its function ``run``."""
LONGEST_NOTE = 600
Row = dict[str, Any]


class SkippedError(Exception):
    """A case that cannot be had here, and why."""


@dataclass
class Cases:
    """The cases of a step, in the journal."""

    step: Step
    journal: Journal
    until: float
    """Seconds since the epoch."""
    rehearsal: bool
    settled: set[str] = field(default_factory=set)
    num_begun: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Of the step."""
        return self.step.settings_for(self.rehearsal)

    @property
    def device(self) -> str:
        """Where everything runs."""
        return "cpu" if self.rehearsal else "cuda"

    def time_is_up(self) -> bool:
        """Whether the time left is too short for a case; the first of a process may have all there is."""
        left = self.until - time.time()
        return left < (self.step.expected if self.num_begun else 1)

    def run(self, case: str, measure: Callable[[], list[Row]]) -> None:
        """Run a case, if it has not been settled already; what goes wrong is its outcome.

        Raises:
            SystemExit: If the time is up, or the device no longer answers.
        """
        if case in self.settled:
            return
        if self.time_is_up():
            print(f"{case}: the time is up")
            sys.exit(0)
        self.begin(case)
        start = time.perf_counter()
        try:
            rows = measure()
        except SkippedError as reason:
            self.end(case, "skipped", str(reason))
        except Exception as error:  # an outcome like another
            traceback.print_exc()
            self.end(case, "failed", f"{type(error).__name__}: {error}")
            self.leave_if_sick()
        else:
            for row in rows:
                self.journal.add("row", self.step.name, case=case, row=row)
            self.end(case, "measured", seconds=round(time.perf_counter() - start, 1))

    def begin(self, case: str) -> None:
        """Note that a case begins."""
        self.num_begun += 1
        self.journal.add("begin", self.step.name, case=case)

    def end(self, case: str, outcome: str, note: str = "", **details: Any) -> None:
        """Note how it ended."""
        self.settled.add(case)
        self.journal.add("end", self.step.name, case=case, outcome=outcome, note=note[:LONGEST_NOTE], **details)

    def leave_if_sick(self) -> None:
        """End the process where the device no longer answers: all further cases would fail for the same reason."""
        if self.rehearsal:
            return
        import torch

        try:
            torch.cuda.synchronize()
            torch.ones(8, device="cuda").sum().item()
        except RuntimeError as error:
            print(f"The device no longer answers: {error}")
            sys.stdout.flush()
            os._exit(SICK)


def main(words: list[str]) -> None:
    """Run the step."""
    path, name, until, parent = words
    journal, step = Journal(Path(path)), find_step(name)
    threading.Thread(target=_leave_with, args=(int(parent),), daemon=True).start()
    header = journal.header()
    assert header is not None
    cases = Cases(step, journal, float(until), header["rehearsal"], set(journal.outcomes(name)))
    if cases.rehearsal:
        importlib.import_module("benchmarks.gpu.rehearsal").pretend_a_gpu()
    elif step.kind != "environment":  # which builds the kernels as a case; a machine that is fresh again has none
        _build_kernels()
    importlib.import_module(KINDS[step.kind]).run(cases)
    journal.add("closed", name, how="complete", note="")


def _build_kernels() -> None:
    """Before the first case, whose time compiling would take."""
    import torch

    from hf_comera.ops.cuda.library import kernels_refusal

    if reason := kernels_refusal(torch.device("cuda", 0)):
        print(f"No kernels: {reason}")


def _leave_with(parent: int) -> None:
    for _ in _seconds():
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(ORPHANED)


def _seconds() -> Iterator[None]:
    while True:
        time.sleep(1)
        yield


if __name__ == "__main__":
    # Under its own name as well, so that the files of the kinds of steps find the same classes.
    sys.modules["benchmarks.gpu.worker"] = sys.modules["__main__"]
    main(sys.argv[1:])
