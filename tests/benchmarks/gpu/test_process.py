"""benchmarks/gpu/process.py, journal.py: what dies or takes too long costs one case, and nothing is done twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import process
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import Step
from benchmarks.gpu.process import Limits, run_step

ROOT = Path(__file__).resolve().parents[3]
WORKER = f"""
import os, signal, sys, time

sys.path.insert(0, {str(ROOT)!r})
from benchmarks.gpu.journal import Journal

path, step, until, parent = sys.argv[1:]
journal = Journal(path=__import__("pathlib").Path(path))
settled = journal.outcomes(step)
if step == "cannot be imported":
    raise ImportError("no such package")
for case in ("first", "second", "third"):
    if case in settled:
        continue
    if time.time() > float(until):
        sys.exit(0)
    journal.add("begin", step, case=case)
    if case == "second" and step == "crashes":
        print("about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == "second" and step == "aborts":
        os._exit(134)
    if case == "second" and step == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.getppid() == int(parent):
            time.sleep(0.05)
        os._exit(70)
    journal.add("row", step, case=case, row={{"case": case}})
    journal.add("end", step, case=case, outcome="measured")
journal.add("closed", step, how="complete", note="")
"""


@pytest.fixture
def journal(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr(process, "WORKER", (str(worker),))
    monkeypatch.setattr(process, "GRACE", 0.3)
    return Journal(tmp_path / "journal.jsonl")


def step_named(name, **settings):
    return Step(**{"name": name, "kind": "tests", "seconds": 60, "case_seconds": 30, **settings})


def run(journal, name, *, call=60.0, step=60.0, **settings):
    now = time.time()
    run_step(step_named(name, **settings), journal, [sys.executable], Limits(now + call, now + step), dict(os.environ))
    return {case: event["outcome"] for case, event in journal.outcomes(name).items()}


@pytest.mark.parametrize(
    ("name", "note"), [("crashes", "Segmentation fault"), ("aborts", "exit status 134 (signal 6, Aborted)")]
)
def test_a_crash_costs_one_case(name, note, journal):
    assert run(journal, name) == {"first": "measured", "second": "died", "third": "measured"}
    assert note in journal.outcomes(name)["second"]["note"]
    assert journal.closed(name)["how"] == "complete"
    assert [row["case"] for row in journal.rows(name)] == ["first", "third"]
    if name == "crashes":
        assert "about to crash" in journal.outcomes(name)["second"]["printed"]


def test_a_case_over_its_time_is_ended(journal):
    start = time.time()
    assert run(journal, "hangs", case_seconds=1) == {"first": "measured", "second": "died", "third": "measured"}
    assert journal.outcomes("hangs")["second"]["note"] == "it took longer than 1 s"
    assert time.time() - start < 20
    assert journal.spent("hangs") == pytest.approx(time.time() - start, abs=1)


def test_a_case_is_tried_once_more_after_the_end_of_a_call(journal):
    assert run(journal, "hangs", call=1.5) == {"first": "measured"}
    assert journal.closed("hangs") is None
    assert run(journal, "hangs", call=1.5) == {"first": "measured", "second": "died"}
    assert "for the second time" in journal.outcomes("hangs")["second"]["note"]
    assert run(journal, "hangs") == {"first": "measured", "second": "died", "third": "measured"}


def test_a_step_that_cannot_begin_is_broken(journal):
    assert run(journal, "cannot be imported") == {}
    assert journal.closed("cannot be imported")["how"] == "broken"
    assert "ImportError: no such package" in journal.closed("cannot be imported")["note"]


def test_a_report_that_was_killed_goes_on(journal):
    program = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import time, pathlib, os
from benchmarks.gpu import process
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import Step
process.WORKER = {process.WORKER!r}
step = Step(name="hangs", kind="tests", seconds=60, case_seconds=30)
limits = process.Limits(time.time() + 60, time.time() + 60)
process.run_step(step, Journal(pathlib.Path({str(journal.path)!r})), [sys.executable], limits, dict(os.environ))
"""
    report = subprocess.Popen([sys.executable, "-c", program])
    while (case := journal.open_case("hangs")) is None or case["case"] != "second":
        time.sleep(0.05)
    report.send_signal(signal.SIGKILL)
    report.wait()
    with journal.path.open("a", encoding="utf-8") as file:
        file.write('{"event": "row", "step": "ha')  # the machine went down in the middle of a line
    journal.mend()
    assert run(journal, "hangs", case_seconds=1) == {"first": "measured", "second": "died", "third": "measured"}


def test_what_is_forgotten_is_done_anew(journal):
    run(journal, "crashes")
    run(journal, "usual")
    journal.forget(["crashes"])
    assert journal.outcomes("crashes") == {}
    assert journal.closed("usual")["how"] == "complete"
    assert set(run(journal, "crashes")) == {"first", "second", "third"}
