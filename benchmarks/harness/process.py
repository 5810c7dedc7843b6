"""Calls a function in a process of its own: without traces of others in memory, or within limits."""

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from loop.memory import hand_back_freed_memory

__all__ = ["Stopped", "call_limited", "in_own_process"]

IMPORTED_ONCE = ["torch", "datasets", "hf_comera"]
"""By the process that the others are copies of; it takes seconds, and leaves no tensors."""
Result = TypeVar("Result")
GIB = 1 << 30


def in_own_process(threads: int, measure: Callable[..., Result], *values: object) -> Result:
    """What ``measure(*values)`` returns in a new process, which hands back freed memory at once.

    Args:
        threads: Of torch there.
        measure: A function of a module; the process imports it.
        values: Plain ones, that can be pickled.
    """
    way = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(way)
    if way == "forkserver":
        context.set_forkserver_preload(IMPORTED_ONCE)
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(threads,)) as pool:
        return pool.submit(measure, *values).result()


def _begin(threads: int) -> None:
    hand_back_freed_memory()
    torch.set_num_threads(threads)
    logging.set_verbosity_error()


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
