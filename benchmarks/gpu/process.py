"""Runs one step of the GPU report in a process of its own: watches its time, and begins it again where it dies.

What the process did stands in the journal. A case during which it died is settled by that, and the next process goes
on with those that are left, so that no crash costs more than one case.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.journal import CUTS_ALLOWED, Journal
from benchmarks.gpu.plan import Step

__all__ = ["Limits", "run_step"]

WORKER = ("-m", "benchmarks.gpu.worker")
MOST_PROCESSES = 25
"""Of one step: a step that dies again and again is left at that."""
STARTING = 180
"""Seconds until the first case of a process begins, at most: imports, and the models of a step."""
TAIL = 1500
"""Letters of what a dead process printed last that go into the journal."""
GRACE = 3
"""Seconds for a process to end on its own after it was asked to."""


@dataclass(frozen=True)
class Limits:
    """Until when a step may run, as seconds since the epoch."""

    call: float
    """The end of this call of the report."""
    step: float


def run_step(
    step: Step, journal: Journal, command: Sequence[str], limits: Limits, environment: dict[str, str]
) -> None:
    """Run a step until it is done, or its time or that of the call is up; all that happens goes into the journal.

    Args:
        step: What to run.
        journal: Where the worker writes too.
        command: Begins the command line of the worker: the interpreter, or a tool that runs it.
        limits: Of time.
        environment: Of the worker.
    """
    start = time.time()
    _settle_open_case(step, journal, "cut", "the process was gone when the report was called again")
    try:
        for _ in range(MOST_PROCESSES):
            settled = len(journal.outcomes(step.name))
            why = _run_process(step, journal, command, limits, environment)
            if why is None:
                return
            if len(journal.outcomes(step.name)) == settled:
                journal.add("closed", step.name, how="broken", note=why)
                return
        journal.add("closed", step.name, how="broken", note=f"it died {MOST_PROCESSES} times")
    finally:
        journal.add("spent", step.name, seconds=round(time.time() - start, 1))


def _run_process(
    step: Step, journal: Journal, command: Sequence[str], limits: Limits, environment: dict[str, str]
) -> str | None:
    """Start the worker once; why it died, or None if it ended in order or its time was up."""
    until = min(limits.call, limits.step)
    words = [*command, *WORKER, str(journal.path), step.name, str(until), str(os.getpid())]
    log = journal.path.with_name(f"{step.name}.log")
    with log.open("ab") as output:
        place = output.tell()
        worker = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            ended_by = _watch(worker, step, journal, limits)
        finally:
            _end(worker)
    printed = log.read_bytes()[place:].decode(errors="replace")[-TAIL:]
    if ended_by == "call" or (ended_by == "step" and not journal.open_case(step.name)):
        _settle_open_case(step, journal, "cut", "the time of the call was up")
        return None
    if ended_by is not None:
        _settle_open_case(step, journal, "died", f"it took longer than {ended_by}", printed)
        return None if ended_by == "step" else "a process that was too slow to begin"
    if worker.returncode == 0:
        return None
    why = _describe(worker.returncode)
    _settle_open_case(step, journal, "died", why, printed)
    return f"{why}: {_last_words(printed)}"


def _watch(worker: subprocess.Popen[bytes], step: Step, journal: Journal, limits: Limits) -> str | None:
    """Wait for the worker; what limit it ran into, or None if it ended by itself."""
    begun = time.time()
    while True:
        try:
            worker.wait(timeout=0.2)
            return None
        except subprocess.TimeoutExpired:
            pass
        now, case = time.time(), journal.open_case(step.name)
        if now > limits.call:
            return "call"
        if now > limits.step + GRACE:
            return "step"
        if case is not None and now - case["time"] > step.case_seconds:
            return f"{step.case_seconds} s"
        last = max([begun, *(event["time"] for event in journal.events(step.name))])
        if case is None and now - last > STARTING:
            return f"{STARTING} s between two cases"


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(worker.pid, number)
        except ProcessLookupError:
            break
        try:
            worker.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            continue
    worker.wait()


def _settle_open_case(step: Step, journal: Journal, how: str, note: str, printed: str = "") -> None:
    """Say how the case ended that nothing was heard of; one that was cut short too often counts as dead."""
    case = journal.open_case(step.name)
    if case is None:
        return
    cuts = sum(event["event"] == "cut" and event["case"] == case["case"] for event in journal.events(step.name))
    if how == "cut" and cuts < CUTS_ALLOWED:
        journal.add("cut", step.name, case=case["case"], note=note)
        return
    details = {"printed": printed} if printed else {}
    note = f"{note}, for the second time" if how == "cut" else note
    journal.add("end", step.name, case=case["case"], outcome="died", note=note, **details)


def _describe(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        number = code - 128 if code > 128 else 0  # a tool that runs the worker passes the signal on so
        return f"exit status {code}" + (f" ({_signal_name(number)})" if number else "")
    return _signal_name(-code)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number}, {signal.strsignal(number)}"
    except ValueError:
        return f"signal {number}"


def _last_words(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing printed"
