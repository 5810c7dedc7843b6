"""Save a checkpoint whole: complete and synced beside its place first, every file stamped with the id of its save.

Renaming several files is not one step, and a process may end between two. So all weight files and ``config.json`` of
one save carry the same id: a mixture of two saves, which would compute something else in silence, is refused when it
is loaded (:mod:`hf_comera.hub.checkpoint`), and the files that are still to be moved are named.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

__all__ = [
    "NOTICE",
    "RECORDS",
    "SAVE_ID",
    "UNFINISHED",
    "atomic_save",
    "disk_refusal",
    "new_save_id",
    "stamped",
    "sync",
]

SAVE_ID, RECORDS = "hf_comera_save_id", "hf_comera_records"
"""Names in the metadata of safetensors files: of the id, and of digests of the records of layers that go with it."""

NOTICE = "CANNOT BE LOADED WITHOUT import hf_comera BEFORE from_pretrained, pip install hf_comera"
"""The name of an empty tensor: Transformers lists it where it loads the file without this library.

Only letters and commas, since some architectures read names as regular expressions.
"""

UNFINISHED = ".saving-"
"""How the names of folders begin in which a save is being written."""

_OF_TORCH = ("PytorchStreamWriter", "inline_container", "iostream error", "Parent directory")
"""In errors of ``torch.save`` where the disk is full or the folder is gone."""

ABANDONED_SECONDS = 3600
"""Folders of saves that are older than this are removed by the next save: no save takes so long."""


def new_save_id() -> str:
    """An id that no other save has; random numbers of torch and Python are left as they are."""
    return secrets.token_hex(8)


def atomic_save(save: Callable[..., Any], directory: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Run ``save(temporary folder)`` and move what it wrote to ``directory``; on an error nothing there changes.

    Weight files of an earlier save of the same variant that the new one does not have (other shards) are removed; all
    other files stay.

    Args:
        save: Writes a checkpoint into the folder that it is given.
        directory: Where the checkpoint belongs; made if missing.
        options: The caller's options for ``save_pretrained``: a push without ``repo_id`` is named after ``directory``.

    Raises:
        ValueError: If ``directory`` is a file.
        OSError: If it cannot be written, or the disk is full.
    """
    target = Path(directory)
    if target.is_file():
        raise ValueError(
            f"save_directory={str(target)!r} is a file; give a folder, for example {str(target) + '-tt'!r}."
        )
    if options.get("push_to_hub"):
        save = _with_repo_id(save, target, options)
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=target))
        try:
            save(temporary)
            _move_in(temporary, target, options.get("variant"))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except BaseException as error:
        if is_new:
            with contextlib.suppress(OSError):  # not empty: another process of the run saves there
                target.rmdir()
        refusal = disk_refusal(error)
        if refusal is None:
            raise
        raise OSError(
            refusal[0],
            f"The model could not be saved ({refusal[1]}); the checkpoint that was there is still whole. Make "
            "room, or give a folder that can be written",
            str(target),
        ) from error


def disk_refusal(error: BaseException) -> tuple[int, str] | None:
    """Number and words of what the operating system refused; None if it was something else that went wrong.

    Libraries in Rust name it in their own errors, and ``torch.save`` says no more than that it could not write.
    """
    if isinstance(error, OSError):
        return None if error.errno is None else (error.errno, os.strerror(error.errno))
    if code := re.search(r"\(os error (\d+)\)", str(error)):
        return int(code[1]), os.strerror(int(code[1]))
    if any(words in str(error) for words in _OF_TORCH):
        return errno.EIO, "torch.save could not write a file"
    return None


@contextlib.contextmanager
def stamped(model: PreTrainedModel, state_dict: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[None]:
    """Within, ``model.save_pretrained`` writes ``state_dict``, with ``metadata`` in every weight file.

    Transformers takes metadata from a quantizer only, so there is one for the time of the save.
    """
    model.hf_quantizer = _StateAndMetadata(state_dict, metadata)
    try:
        yield
    finally:
        del model.hf_quantizer


class _StateAndMetadata(HfQuantizer):
    """Hands a state and metadata to ``save_pretrained``; quantizes nothing."""

    def __init__(self, state_dict: dict[str, Tensor], metadata: dict[str, str]) -> None:
        self.state_dict, self.metadata = state_dict, metadata

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What is to be saved."""
        return self.state_dict, dict(self.metadata)

    def is_serializable(self) -> bool:
        """Asked by ``save_pretrained``."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Asked by nobody during a save."""
        return True


def _move_in(temporary: Path, target: Path, variant: str | None) -> None:
    """Weights, then their index, then ``config.json``, before which old weights go that nothing replaced.

    At no moment can a folder be read as a third model: until the index is there the old files are found, or files of
    two saves are, which is refused.
    """
    written = sorted(temporary.iterdir(), key=lambda path: (path.name == "config.json", path.suffix == ".json"))
    for path in written:
        sync(path)
    for path in written:
        if path.name == "config.json":
            _remove_stale_weights(target, {path.name for path in written}, variant)
        os.replace(path, target / path.name)
        sync(target)
    for left in target.glob(f"{UNFINISHED}*"):
        if left != temporary and time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the contents of a file, or the names in a folder, on the disk before anything that follows."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_repo_id(save: Callable[..., Any], target: Path, options: dict[str, Any]) -> Callable[..., Any]:
    def save_and_push(folder: Path) -> None:
        save(folder, repo_id=options.get("repo_id", target.name))

    return save_and_push


def _remove_stale_weights(target: Path, written: set[str], variant: str | None) -> None:
    """Only when new weights replace them: other ranks of a distributed save write no weights."""
    ending = f".{re.escape(variant)}" if variant else ""
    shard = r"(-\d{5}-of-\d{5})?"
    weights = re.compile(rf"model{ending}{shard}\.safetensors|model\.safetensors\.index{ending}\.json")
    if not any(weights.fullmatch(name) for name in written):
        return
    for path in target.iterdir():
        if path.name not in written and weights.fullmatch(path.name):
            path.unlink()
