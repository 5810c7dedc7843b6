"""Calls a function in a process of its own, where nothing else has left traces in memory."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch
from transformers.utils import logging

from freed_memory import hand_back_freed_memory

__all__ = ["in_own_process"]

IMPORTED_ONCE = ["torch", "datasets", "hf_comera"]
"""By the process that the others are copies of; it takes seconds, and leaves no tensors."""
Result = TypeVar("Result")


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
