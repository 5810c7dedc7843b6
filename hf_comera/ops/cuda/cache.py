"""The folder of compiled kernels: nobody else may write there, which is checked before anything in it is loaded.

Loading a library runs its code, and its name in the cache follows from public sources. So folders are made for their
owner alone, and a folder or library that others own or may write is refused. What is checked is what was opened, not
what a path means a moment later.
"""

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["KernelBuildError", "cache_folder", "check_library", "load_library", "make_own_folder"]

OPENED = Path("/proc/self/fd")
"""Where Linux names what a process has opened."""


class KernelBuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says what is missing, refused, or what nvcc said."""


def cache_folder() -> Path:
    """``$HF_COMERA_CACHE``, else ``hf_comera`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    if own := os.environ.get("HF_COMERA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_comera"


def make_own_folder(folder: Path) -> None:
    """Make ``folder``, and what is missing above it, for this user alone; check it where it is there.

    Raises:
        KernelBuildError: If others own it or may write there.
        OSError: If it cannot be made or opened.
    """
    for missing in [each for each in (*reversed(folder.parents), folder) if not each.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    with _opened(folder, os.O_DIRECTORY):
        pass


def check_library(library: Path) -> None:
    """Check a library, its folder and the one above, as ``load_library`` does, without loading it.

    Raises:
        KernelBuildError: If others own one of them or may write there.
        OSError: If one of them cannot be opened.
    """
    with _opened_library(library):
        pass


def load_library(library: Path) -> ctypes.CDLL:
    """Load a library that only this user (or root) can have written.

    Raises:
        KernelBuildError: If others own the library, its folder or the one above, or may write there.
        OSError: If it cannot be opened or loaded.
    """
    with _opened_library(library) as descriptor:
        # Stays open: loaders know libraries by name, and would take the next one with a number that is free again for
        # this one.
        opened = OPENED / str(os.dup(descriptor))
        return ctypes.CDLL(str(opened if opened.exists() else library))


@contextlib.contextmanager
def _opened_library(library: Path) -> Iterator[int]:
    """The library, opened in its folder, opened in the one above."""
    folder = library.parent
    with (
        _opened(folder.parent, os.O_DIRECTORY) as above,
        _opened(folder, os.O_DIRECTORY | os.O_NOFOLLOW, above) as inside,
        _opened(library, os.O_NOFOLLOW, inside) as descriptor,
    ):
        yield descriptor


@contextlib.contextmanager
def _opened(path: Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """``path``, found by its last part where its folder is opened, after a look at what was opened."""
    descriptor = os.open(path if folder is None else path.name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        _check(path, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _check(path: Path, found: os.stat_result) -> None:
    user, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if found.st_uid not in (user, 0):
        trouble = f"belongs to user {found.st_uid}, not to user {user} who runs this (nor to root)"
        remedy = "Set HF_COMERA_CACHE to a folder of your own, for example in your home"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        trouble = f"has mode {mode:04o}, so that others may write to it"
        remedy = f"If nobody did, run `chmod -R go-w {path}`; else delete it or set HF_COMERA_CACHE to another place"
    else:
        return
    raise KernelBuildError(
        f"{path} in the cache of compiled kernels {trouble}: what others can write is not loaded. {remedy}."
    )
