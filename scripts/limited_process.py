"""Calls a function in a process of its own that may take so many seconds and so much memory, and hears its messages.

The process is forked from a server that has imported what is slow to import, so it starts in a few milliseconds.
"""

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Stopped", "call_limited"]

GIB = 1 << 30


class Stopped(Exception):  # noqa: N818  # not an error of the program: a limit that did its work
    """The process went past a limit, or ended without an answer; says which."""


def call_limited(
    work: Callable[..., None], values: Sequence[object], *, seconds: float, gib: float, imports: Sequence[str] = ()
) -> list[Any]:
    """The messages that ``work(send, *values)`` sent, ``send`` being a function of one value that can be pickled.

    Args:
        work: A function of a module; the process imports it. Its prints and warnings go nowhere.
        values: Plain ones, that can be pickled.
        seconds: Wall-clock time after which the process is killed.
        gib: Address space, above which an allocation fails.
        imports: Modules that the server imports once, before the first call.

    Raises:
        Stopped: With all messages until then as its second argument.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imports))
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, gib, work, tuple(values)), daemon=True)
    process.start()
    there.close()
    try:
        return _messages(here, process, time.monotonic() + seconds, seconds)
    finally:
        process.kill()
        process.join()
        here.close()


def _messages(here: Connection, process: Any, end: float, seconds: float) -> list[Any]:
    messages: list[Any] = []
    while here.poll(max(end - time.monotonic(), 0)):
        try:
            kind, message = here.recv()
        except EOFError:
            process.join()
            raise Stopped(f"the process ended with status {process.exitcode}", messages) from None
        if kind == "end":
            process.join(timeout=5)  # so that it can clean up
            return messages
        if kind == "error":
            raise Stopped(message, messages)
        messages.append(message)
    raise Stopped(f"stopped after {seconds:g} seconds", messages)


def _run(there: Connection, gib: float, work: Callable[..., None], values: tuple[object, ...]) -> None:
    """The process: limits, silence, the work."""
    limit = int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    try:
        work(lambda message: there.send(("message", message)), *values)
    except BaseException as problem:
        there.send(("error", f"{type(problem).__name__}: {problem}"))
    else:
        there.send(("end", None))
