"""What happens to a training's files, for tests: a process killed between two steps, and files that get damaged."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest


class Killed(BaseException):
    """In place of SIGKILL: nothing reaches the disk any more, no cleaning up either."""


@contextlib.contextmanager
def killed_at(number):
    """Within, the step of that number on the file system does not happen, nor any after it; yields the count."""
    steps = [0]

    def counted(operation):
        def step(*args, **kwargs):
            steps[0] += 1
            if steps[0] >= number:
                raise Killed
            return operation(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, counted(getattr(os, name)))
        for name in ("rename", "mkdir", "write_text"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        yield steps


def zero(path, other):
    path.write_bytes(b"")


def half(path, other):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def gone(path, other):
    path.unlink()


def foreign(path, other):
    """As it is in another checkpoint, if it differs there; else of the same size with other contents."""
    contents, theirs = path.read_bytes(), (other / path.name).read_bytes() if (other / path.name).is_file() else b""
    path.write_bytes(theirs if theirs not in (b"", contents) else contents[:-1] + bytes([contents[-1] ^ 1]))


DAMAGES = [zero, half, gone, foreign]
