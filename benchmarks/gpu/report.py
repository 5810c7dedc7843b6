"""Test and measure everything that needs a GPU, step by step, and write one page with verdicts.

    make gpu-report                       # again and again, until it says that it is complete
    make gpu-report REHEARSE=1            # all of it on a CPU, tiny and emulated; its figures mean nothing

`--help` says more.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.devices import describe_devices, missing_packages, unmet_needs
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.page import write_results
from benchmarks.gpu.plan import STEPS, Step, steps
from benchmarks.gpu.process import Limits, run_step

ROOT = Path(__file__).resolve().parents[2]
FOLDER, REHEARSAL_FOLDER = ROOT / "outputs" / "gpu_report", ROOT / "outputs" / "gpu_rehearsal"
KERNELS = ROOT / "kernels"
PREFIX = "========="
NOT_FINDINGS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Warning", "Target")
MOST_EXAMPLES = 5
DESCRIPTION = """\
Runs the tests that need a GPU, compute-sanitizer, the models and losses of the
training scripts, and the benchmarks of kernels and of whole training steps, in
order of value, each step in a process of its own. A call ends after --seconds;
the next one goes on where it stopped, also where it was killed. Needed are
torch, transformers, accelerate and peft; nvcc for the kernels. Nothing is
installed or downloaded.

In the folder: report.md (the page with verdicts), report.csv (every figure),
bench_kernels.csv and bench_step.csv (rows as in benchmarks/results/), log.txt
(what was printed), journal.jsonl (from which the next call goes on).
"""
JOURNAL = "journal.jsonl"
SOURCES = (
    "hf_comera/**/*.py",
    "kernels/*.cu",
    "kernels/*.h",
    "benchmarks/**/*.py",
    "scripts/**/*.py",
    "tests/**/*.py",
)
LEAST_START = 25
"""Seconds that must be left of a call for a step to begin; less is not enough for its imports and a case."""
MOST_LOG_BYTES = 700_000
"""Of each step in log.txt: its end."""


def main(argv: Sequence[str] | None = None) -> int:
    """One call of the report.

    Returns:
        0 when the call ended in order, whether or not there is more to do; 2 when it could not begin.
    """
    start, args = time.time(), parse_arguments(argv)
    folder = args.work or (REHEARSAL_FOLDER if args.rehearse else FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    with only_call(folder / "lock"):
        journal = open_journal(folder, args)
        if isinstance(journal, str):
            print(journal, file=sys.stderr)
            return 2
        for step in steps(args.only):
            do_step(step, journal, args, start + args.seconds)
            deliver(journal, args)
        missing = [step.name for step in STEPS if journal.closed(step.name) is None]
        deliver(journal, args)
    print(f"\nThe page: {(args.out or folder) / 'report.md'}")
    if missing:
        print(f"Not done: {', '.join(missing)}. Call again to go on.")
    else:
        print("The report is complete.")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.report", description=DESCRIPTION, formatter_class=keep_lines
    )
    parser.add_argument("--out", type=Path, help="folder for the results; default: where the report works")
    parser.add_argument(
        "--work", type=Path, help=f"where it works and goes on from; default {FOLDER.relative_to(ROOT)}"
    )
    parser.add_argument("--seconds", type=float, default=480, help="of this call; default 480")
    parser.add_argument("--total", type=float, default=2400, help="seconds of all calls together; default 2400")
    parser.add_argument("--only", nargs="*", default=[], metavar="STEP", help="do these steps anew, and no others")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny models and emulated kernels")
    parser.add_argument("--devices", type=json.loads, help="what a rehearsal believes to find, as a list in JSON")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="its path; default: as found on the PATH")
    args = parser.parse_args(argv)
    if args.devices is not None and not args.rehearse:
        parser.error("--devices is for --rehearse alone: a report is of the GPUs that torch finds")
    try:
        steps(args.only)
    except ValueError as problem:
        parser.error(str(problem))
    return args


@contextmanager
def only_call(path: Path) -> Iterator[None]:
    """Refuse to run beside another call on the same folder; the system lets go of the lock of one that was killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"Another call works in {path.parent}. Wait for it, or name another folder: --work FOLDER.")
        yield


def open_journal(folder: Path, args: argparse.Namespace) -> Journal | str:
    """The journal to go on with, or why there can be none."""
    journal = Journal(folder / JOURNAL)
    if args.out is not None:
        fetch_longer(args.out / JOURNAL, journal.path)
    journal.mend()
    try:
        found = describe_devices(args.rehearse, args.devices)
    except RuntimeError as error:
        return str(error)
    if not found["devices"]:
        return "torch finds no CUDA device, so there is nothing to report. On a CPU: make gpu-report REHEARSE=1"
    header = journal.header()
    if header is None:
        journal.add("report", **found)
    elif (header["rehearsal"], header["devices"]) != (found["rehearsal"], found["devices"]):
        return (
            f"{folder} holds a report of {header['devices']} (rehearsal: {header['rehearsal']}), and this is "
            f"{found['devices']} (rehearsal: {found['rehearsal']}). Delete the folder, or name another: WORK=FOLDER."
        )
    for name, why in missing_packages().items():
        print(f"{name} is not installed: {why}")
    if args.only:
        journal.forget(args.only)
        for name in args.only:
            folder.joinpath(f"{name}.log").unlink(missing_ok=True)
    return journal


def fetch_longer(delivered: Path, kept: Path) -> None:
    """Go on from the results that another machine delivered, where they know more than this one."""
    if delivered.exists() and (not kept.exists() or delivered.stat().st_size > kept.stat().st_size):
        shutil.copyfile(delivered, kept)


def do_step(step: Step, journal: Journal, args: argparse.Namespace, end_of_call: float) -> None:
    """Run what is left of a step, as far as the time goes."""
    if journal.closed(step.name) is not None:
        return
    header = journal.header()
    assert header is not None
    now, spent, all_spent = time.time(), journal.spent(step.name), journal.spent()
    if unmet := unmet_needs(step, header, args.sanitizer):
        journal.add("closed", step.name, how="skipped", note=unmet)
    elif spent >= step.seconds or all_spent >= args.total:
        left = "its time" if spent >= step.seconds else "the time of the report"
        journal.add("closed", step.name, how="out of time", note=f"{left} is used up")
    elif end_of_call - now < LEAST_START + step.expected:
        return
    else:
        print(f"{step.name} ...", flush=True)
        journal.add("started", step.name, sources=sources_digest())
        allowed = min(step.seconds - spent, args.total - all_spent)
        words, environment = command_of(step, args, journal.path.parent)
        log = journal.path.with_name(f"{step.name}.log")
        before = log.stat().st_size if log.exists() else 0
        run_step(step, journal, words, Limits(end_of_call - 5, now + allowed), environment)
        if "tool" in step.settings:
            printed = log.read_bytes()[before:].decode(errors="replace")
            journal.add("row", step.name, case="findings", row=read_findings(printed, step.settings["tool"]))
        if journal.closed(step.name) is None and journal.spent(step.name) >= step.seconds - step.expected:
            journal.add("closed", step.name, how="out of time", note=f"{step.seconds} s are used up")
    outcomes = [event["outcome"] for event in journal.outcomes(step.name).values()]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    closed = journal.closed(step.name) or {"how": "to be gone on with", "note": ""}
    print(f"{step.name}: {closed['how']} {closed['note']}; {counts or 'no case'}".replace(" ;", ";"), flush=True)


def command_of(step: Step, args: argparse.Namespace, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What the worker of a step is begun with, and its environment."""
    words, environment = [sys.executable], dict(os.environ)
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    cache = Path(tempfile.gettempdir()) / f"hf_comera-tests-{os.getuid()}"  # that of the tests: compiled once
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "HF_COMERA_CACHE": environment.get("HF_COMERA_CACHE", str(cache)),
    }  # fmt: skip
    if args.rehearse:
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    tool = step.settings.get("tool")
    if tool is None:
        return words, environment
    if tool in ("memcheck", "initcheck"):  # without torch's cache they see where each tensor begins and ends
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    sanitizer = [args.sanitizer, "--tool", tool]
    if args.rehearse and shutil.which(args.sanitizer) is None:
        sanitizer = [sys.executable, "-m", "benchmarks.gpu.rehearsal", "--tool", tool]
    return [*sanitizer, *words], environment


def sources_digest() -> str:
    """Tells whether two steps were of the same sources."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def deliver(journal: Journal, args: argparse.Namespace) -> None:
    """Write page, rows and log, and copy all of it to where it is wanted."""
    folder = journal.path.parent
    names = [*write_results(journal, folder), JOURNAL, "log.txt"]
    with (folder / "log.txt").open("wb") as file:
        for step in STEPS:
            log = folder / f"{step.name}.log"
            if log.exists():
                file.write(f"\n######## {step.name}\n".encode() + log.read_bytes()[-MOST_LOG_BYTES:])
    if args.out is not None and args.out.resolve() != folder.resolve():
        args.out.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(folder / name, args.out / name)


def kernel_names() -> list[str]:
    """Names of the functions that run on a GPU, from the sources."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.cu")))
    return sorted(set(re.findall(r"\bKERNEL\s+(?:LAUNCH_BOUNDS\([^)]*\)\s*)?(\w+)\(", text)))


def read_findings(log: str, tool: str) -> dict[str, Any]:
    """A row: how many findings name a kernel of ours, how many only others, and the first of ours in words.

    What the libraries of torch do is not ours to mend: initcheck finds reads of fresh memory in many of them.
    """
    ours, others = [], 0
    name = re.compile(rf"(?<!native::)\b(?:{'|'.join(kernel_names())})\b")
    for block in _blocks(log):
        if name.search(block):
            ours.append(" ".join(block.split())[:300])
        else:
            others += 1
    return {"tool": tool, "ours": len(ours), "others": others, "examples": ours[:MOST_EXAMPLES]}


def _blocks(log: str) -> list[str]:
    """Findings: a line that begins at the margin of the tool, and those below it that are indented."""
    blocks: list[list[str]] = []
    for line in log.splitlines():
        if not line.startswith(PREFIX):
            continue
        text = line.removeprefix(PREFIX)
        if text.startswith("     ") and blocks:
            blocks[-1].append(text)
        elif text.strip():
            blocks.append([text.strip()])
    return ["\n".join(block) for block in blocks if not block[0].startswith(NOT_FINDINGS)]


if __name__ == "__main__":
    sys.exit(main())
