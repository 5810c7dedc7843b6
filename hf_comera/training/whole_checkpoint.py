"""Checkpoints of a training that are whole or refused: each lists its files with sizes and digests, written last.

A checkpoint is written in a folder beside its place, put on the disk, and renamed. So a process that ends, or a
machine that loses power, leaves it there whole or not at all. Later damage to its files is found before one is loaded.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_comera.hub.checkpoint import disk_refusal, sync

__all__ = ["MANIFEST", "UNFINISHED", "checkpoint_step", "checkpoints", "damage", "drop_old", "newest_whole", "writing"]

MANIFEST = "checkpoint_files.json"
"""Lists all other files of a checkpoint."""

UNFINISHED = "_unfinished"
"""The folder beside the checkpoints in which one is written. Pushing to the Hub leaves out what begins like that."""

_PREFIX = "checkpoint-"
_VERSION = 1


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, whole or not, those of fewer steps first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted((path for path in found if path.is_dir()), key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """The number of steps after which a checkpoint was written."""
    return int(path.name.removeprefix(_PREFIX))


def damage(checkpoint: Path) -> str | None:
    """The damage to the files of a checkpoint: file, contents found, contents written. None if it is whole.

    Files that are not in its list, such as those of callbacks, are left alone.
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        return f"{path} is missing"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format_version"], manifest["files"]
        written = {name: (int(facts["bytes"]), str(facts["sha256"])) for name, facts in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{path} has {path.stat().st_size:,} bytes that are no list of files"
    if version != _VERSION:
        return f"{path} is of format {version!r}, and this version of hf_comera reads {_VERSION}"
    for name, (size, _) in written.items():  # which costs nothing, and finds most of what happens
        file = checkpoint / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size:,} bytes, and {size:,} were written"
    for name, (_, digest) in written.items():
        if _digest(checkpoint / name) != digest:
            return f"{checkpoint / name} has other contents than were written"
    return None


def newest_whole(
    folder: Path, flaw: Callable[[Path], str | None] = damage, *, below: int | None = None
) -> tuple[Path | None, list[str]]:
    """The whole checkpoint of the most steps in ``folder``, and what is wrong with those of more steps.

    Args:
        folder: With the checkpoints.
        flaw: Says what is wrong with one, or None.
        below: Only those of fewer steps.
    """
    flaws: list[str] = []
    for checkpoint in reversed(checkpoints(folder)):
        if below is not None and checkpoint_step(checkpoint) >= below:
            continue
        found = flaw(checkpoint)
        if found is None:
            return checkpoint, flaws
        flaws.append(found)
    return None, flaws


@contextlib.contextmanager
def writing(
    final: Path, *, is_main: bool = True, wait: Callable[[], Any] = lambda: None, **facts: Any
) -> Iterator[Path]:
    """Within, a checkpoint is written into the folder that is given; at the end it is at ``final``, or nothing is.

    A checkpoint that was there is replaced. All processes of a training call this together.

    Args:
        final: Where the checkpoint belongs.
        is_main: Whether this process does what one has to do; with disks of their own, one on each machine.
        wait: Waits for all processes.
        facts: What else the list of files says, for its readers.

    Raises:
        OSError: If it cannot be written, of whatever type the error was; nothing of it is left then.
    """
    home = final.parent / UNFINISHED
    try:
        if is_main:
            shutil.rmtree(home, ignore_errors=True)  # of a process that was killed
            (home / final.name).mkdir(parents=True)
        wait()
        yield home / final.name
        wait()
        if is_main:
            _list_files(home / final.name, facts)
            _move(home, final)
    except BaseException as error:
        if is_main:
            shutil.rmtree(home, ignore_errors=True)
        if told := _told(error, final):
            raise told from error
        raise
    wait()


def drop_old(newest: Path, limit: int | None, keep: Path | None = None) -> None:
    """Remove checkpoints beside ``newest``, which has just been written, until there are ``limit``.

    First go those of more steps, from which this training turned away, then those of the fewest.

    Args:
        newest: Stays.
        limit: Checkpoints that may stay, or None.
        keep: Stays too, if given.
    """
    if limit is None or limit <= 0:
        return
    found = checkpoints(newest.parent)
    step = checkpoint_step(newest)
    order = sorted(found, key=lambda path: (checkpoint_step(path) <= step, checkpoint_step(path)))
    others = [path for path in order if path.name != newest.name and (keep is None or path.name != keep.name)]
    for path in others[: max(len(found) - limit, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _list_files(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Have all files on the disk, and then the list of them."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / MANIFEST)
    for path in files:
        sync(path)
    listed = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in files
    }
    manifest = {"format_version": _VERSION, **facts, "files": listed}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    sync(checkpoint / MANIFEST)
    for folder in (*(path for path in checkpoint.rglob("*") if path.is_dir()), checkpoint):
        sync(folder)


def _move(home: Path, final: Path) -> None:
    """Put the whole folder in its place; the one that was there goes last."""
    if final.exists():
        final.rename(home / "replaced")
    (home / final.name).rename(final)
    sync(final.parent)
    shutil.rmtree(home, ignore_errors=True)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _told(error: BaseException, final: Path) -> OSError | None:
    """The refusal of the disk, in one sentence with the remedy; None for any other error."""
    refusal = disk_refusal(error)
    if refusal is None:
        return None
    before = [path.name for path in checkpoints(final.parent) if path.name != final.name][-1:]
    there = f"resume from {before[0]}, the newest that is there" if before else "start again, for none is there yet"
    words = f"A checkpoint could not be written ({refusal[1]}): make room, or see to it that {final.parent} can be "
    return OSError(refusal[0], f"{words}written, and {there}", str(final))
