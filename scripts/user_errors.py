"""How a script ends when a setting, a file, a checkpoint or the disk cannot be used: with the message alone."""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import hf_comera
from hf_comera.hub.checkpoint import disk_refusal

PACKAGE = Path(hf_comera.__file__).resolve().parent
STATUS = 2  # that of argparse
# What a disk says that is full, may not be written, or holds something else in that place; whoever asked it.
REFUSALS = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR,
    errno.EISDIR,
})  # fmt: skip


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
            script, file = (Path(path).name for path in (sys.argv[0], place.filename))
            told = f"({file}, line {place.lineno}; python scripts/{script} --help explains every option)"
            print(f"{script}: error: {message}\n  {told}", file=sys.stderr)
        return STATUS


def _message(problem: Exception, source: Path) -> str | None:
    """What to tell of an error that was raised in ``source``; None if that is not enough."""
    # not by name: a clone is called hf_comera too, and has the packages of others in its .venv
    is_own = source.parent == Path(__file__).resolve().parent or PACKAGE in source.parents
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
