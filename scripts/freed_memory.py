"""Tell the C library what to do with freed memory: keep it for the next tensor, or hand it back to the system."""

import ctypes
import sys
from typing import Any

__all__ = ["hand_back_freed_memory", "keep_freed_memory", "trim_memory"]

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_NEVER = 2**31 - 1
_SMALLEST_OWN_BLOCK = 65536


def keep_freed_memory() -> bool:
    """Stop returning large freed blocks to the system.

    On a CPU every output of some megabytes is otherwise fresh memory, and touching fresh memory costs a page fault
    every 4096 bytes: more time than a thin matrix product takes. The process keeps its peak size in exchange.

    Returns:
        Whether the C library could be told: True with glibc on Linux, False elsewhere, where nothing changes.
    """
    return _set_options({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER})


def hand_back_freed_memory() -> bool:
    """Return every freed block of 64 KiB and more to the system at once, so that the resident size is what is in use.

    glibc otherwise raises the size from which blocks are returned to that of the largest one freed so far, up to
    32 MiB, and keeps smaller ones in an arena for each thread.

    Returns:
        As for :func:`keep_freed_memory`.
    """
    return _set_options({_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _SMALLEST_OWN_BLOCK, _M_TRIM_THRESHOLD: 0})


def trim_memory() -> None:
    """Return what lies free already; nothing without glibc."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _set_options(options: dict[int, int]) -> bool:
    mallopt = _function("mallopt")
    return mallopt is not None and all([bool(mallopt(name, value)) for name, value in options.items()])


def _function(name: str) -> Any:
    """A function of glibc; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
