"""Write a checkpoint beside its place and rename: a folder never holds half of one."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["atomic_save"]


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
    """
    target = Path(directory)
    if target.is_file():
        raise ValueError(
            f"save_directory={str(target)!r} is a file; give a folder, for example {str(target) + '-tt'!r}."
        )
    target.mkdir(parents=True, exist_ok=True)
    if options.get("push_to_hub"):
        save = _with_repo_id(save, target, options)
    temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        save(temporary)
        written = sorted(temporary.iterdir(), key=lambda path: path.name == "config.json")
        _remove_stale_weights(target, {path.name for path in written}, options.get("variant"))
        for path in written:
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
