"""How a script's processes start and end, how it refuses settings, and the command that goes on with a run."""

import errno
import gc
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from rich.console import Console

import hf_comera
from hf_comera.hub.checkpoint import disk_refusal
from loop.measure import program
from loop.memory import keep_freed_memory
from loop.settings import LoopSettings

SCRIPTS = Path(__file__).resolve().parents[1]
OWN_FOLDERS = (Path(hf_comera.__file__).resolve().parent, SCRIPTS, SCRIPTS.with_name("benchmarks"))
STATUS = 2  # that of argparse
# What a disk says that is full, may not be written, or holds something else in that place; whoever asked it.
REFUSALS = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR,
    errno.EISDIR,
})  # fmt: skip


def make_accelerator(training: LoopSettings, name: str, settings: Mapping[str, Any]) -> Accelerator:
    """The accelerator the settings ask for, with its trackers and the threads of the CPU.

    Args:
        training: How to train.
        name: Of the project in the trackers.
        settings: All settings, for the trackers.
    """
    accelerator = Accelerator(
        mixed_precision=training.mixed_precision,
        cpu=training.use_cpu,
        log_with=training.report_to if training.with_tracking else None,
        project_dir=training.output_dir,
    )
    prepare_process(training)
    if training.with_tracking:
        known = {name: value for name, value in settings.items() if value is not None}
        accelerator.init_trackers(name, config=known)
    return accelerator


def prepare_process(training: LoopSettings) -> None:
    """Set threads and memory of a process that computes on the CPU."""
    state = PartialState()
    if state.device.type == "cpu":
        # accelerate launch leaves one thread to a script it starts on the CPU without being told a number
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        keep_freed_memory()
        torch.set_num_threads(training.num_threads or max(1, cores // state.num_processes))


def describe_devices() -> str:
    """What is trained on, in a few words."""
    state = PartialState()
    devices = f"{state.num_processes} x {state.device.type}"
    if state.device.type == "cpu":
        devices += f", {torch.get_num_threads()} threads each"
    return devices


def shut_down(accelerator: Accelerator) -> None:
    """Finish trackers and processes; the caller has let go of the model as Accelerate wrapped it.

    With gloo, a DDP object that outlives its process group deadlocks now and then (torch 2.13): its destructor joins a
    thread that waits for the interpreter's lock. So it goes first.
    """
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def say_how_to_resume(step: int, total_steps: int, command: str, console: Console) -> None:
    """Print that the run was interrupted, and the command that goes on with it."""
    console.print(f"\nInterrupted after step {step} of {total_steps}; everything is saved. Go on with:\n  {command}")


def resume_command(script: str, arguments: Sequence[str], checkpoint: str | os.PathLike[str]) -> str:
    """The shell command that goes on from ``checkpoint`` with a run that ``arguments`` started."""
    return launch_command(script, [*without_resume(arguments), "--resume_from_checkpoint", str(checkpoint)])


def launch_command(script: str, arguments: Sequence[str]) -> str:
    """The shell command that runs ``script`` with ``arguments``."""
    return shlex.join(["accelerate", "launch", script, *arguments])


def without_resume(arguments: Sequence[str]) -> list[str]:
    """``arguments`` without the settings that say how to begin."""
    kept, skip = [], False
    for argument in arguments:
        name = argument.partition("=")[0].replace("-", "_").lstrip("_")
        begins = argument.startswith("--") and name in {"resume_from_checkpoint", "overwrite_output_dir"}
        if not skip and not begins:
            kept.append(argument)
        skip = begins and name == "resume_from_checkpoint" and "=" not in argument
    return kept


def run_script(main: Callable[[], int | None]) -> int:
    """``main()``; what the project's own code refuses, and what a disk does, becomes a message and the exit status 2.

    Other errors of other packages say nothing of settings and keep their traceback.
    """
    try:
        return main() or 0
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        message = _message(problem, Path(place.filename).resolve())
        if message is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all processes read the same settings
            command, file = program(sys.argv[0]), Path(place.filename).name
            told = f"({file}, line {place.lineno}; {' '.join(command)} --help explains every option)"
            print(f"{Path(command[-1]).name}: error: {message}\n  {told}", file=sys.stderr)
        return STATUS


def _message(problem: Exception, source: Path) -> str | None:
    """What to tell of an error that was raised in ``source``; None if that is not enough."""
    # not by name: a clone is called hf_comera too, and has the packages of others in its .venv
    is_own = any(folder in source.parents for folder in OWN_FOLDERS)
    if isinstance(problem, ValueError) and is_own:
        return str(problem)
    if isinstance(problem, OSError) and is_own and problem.errno is not None:
        return f"{problem.strerror}: {problem.filename}."
    refusal = disk_refusal(problem)
    if refusal is None or refusal[0] not in REFUSALS:
        return None
    named = f" {problem.filename}" if isinstance(problem, OSError) and problem.filename else ""
    return (
        f"The disk refused a file{named} ({refusal[1]}). Make room, or name a folder that can be written, and go on "
        "with --resume_from_checkpoint latest if there is a checkpoint."
    )
