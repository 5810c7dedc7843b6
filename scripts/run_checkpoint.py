"""Checkpoints to continue from, number for number: written whole or not at all, read only by the run they are of."""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from loop_settings import LoopSettings

_PREFIX = "checkpoint-"
_UNFINISHED = ".unfinished"
_SETTINGS, _HISTORY = "run_settings.json", "history.json"
# What a run may change on its way without changing its numbers.
FREE_SETTINGS = frozenset({
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "checkpointing_steps", "save_total_limit",
    "logging_steps", "dataloader_num_workers", "preprocessing_num_workers", "speed_comparison_steps",
    "with_tracking", "report_to", "push_to_hub", "hub_model_id", "hub_private_repo", "use_cpu", "num_threads",
    "num_train_epochs", "max_train_steps",  # the number of steps that follows from them must be the same
    "train_file", "validation_file", "test_file", "data_file", "fold_column", "dataset_name",
    "results_file", "model_name_or_path", "config_name", "tokenizer_name",
})  # fmt: skip


def run_identity(settings: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """All that decides the numbers of a run: the settings that matter and what was made from the data.

    Names of files and models are left out: what was read from them is in ``facts``.
    """
    return {name: value for name, value in settings.items() if name not in FREE_SETTINGS} | facts


def fingerprint(arrays: list[np.ndarray]) -> str:
    """A short name for the contents of ``arrays``."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in ``folder``, oldest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """The number of steps after which a checkpoint was written."""
    return int(path.name.removeprefix(_PREFIX))


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    step: int,
    *,
    identity: dict[str, Any],
    history: dict[str, Any],
    keep: int,
    kept_folder: Path | None = None,
) -> Path:
    """Write everything needed to continue after ``step``, and drop all but the newest ``keep`` checkpoints.

    ``kept_folder``, where it exists, is copied into the checkpoint; :func:`restore_folder` brings it back.
    Written under another name and renamed when it is whole: an interruption leaves no half checkpoint.
    """
    final, unfinished = folder / f"{_PREFIX}{step}", folder / f"{_PREFIX}{step}{_UNFINISHED}"
    if accelerator.is_main_process:
        for leftover in folder.glob(f"{_PREFIX}*{_UNFINISHED}"):
            shutil.rmtree(leftover)
    accelerator.wait_for_everyone()
    # It warns of weights that are tied, as those of every masked language model are; loading ties them again.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if kept_folder is not None and kept_folder.is_dir():
            shutil.copytree(kept_folder, unfinished / kept_folder.name)
        (unfinished / _SETTINGS).write_text(json.dumps(identity, indent=2), encoding="utf-8")
        (unfinished / _HISTORY).write_text(json.dumps(history), encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def restore_folder(accelerator: Accelerator, checkpoint: Path, kept_folder: Path) -> None:
    """Bring ``kept_folder`` to the state it had when the checkpoint was written."""
    if accelerator.is_main_process:
        shutil.rmtree(kept_folder, ignore_errors=True)
        if (checkpoint / kept_folder.name).is_dir():
            shutil.copytree(checkpoint / kept_folder.name, kept_folder)
    accelerator.wait_for_everyone()


def find_checkpoint(wanted: str, folder: Path) -> Path:
    """The checkpoint called ``wanted``: a folder, or "latest" for the newest one in ``folder``.

    Raises:
        ValueError: If there is none.
    """
    found = checkpoints(folder)
    if wanted != "latest":
        path = Path(wanted)
        if (path / _HISTORY).is_file():
            return path
        names = ", ".join(map(str, found)) or f"none in {folder}"
        raise ValueError(f"--resume_from_checkpoint {wanted} is not a checkpoint of this script. There are: {names}.")
    if not found:
        raise ValueError(
            f"--resume_from_checkpoint latest: {folder} has no checkpoint. Start without this setting, or name "
            "the folder the run was started with by --output_dir."
        )
    return found[-1]


def read_history(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The history stored in a checkpoint, once it is sure that the checkpoint is of the same run.

    Raises:
        ValueError: If the checkpoint was written by a run with other settings or other data.
    """
    stored = json.loads((path / _SETTINGS).read_text(encoding="utf-8"))
    present = json.loads(json.dumps(identity))
    differing = [
        f"{name} was {stored.get(name)!r}, is {present.get(name)!r}"
        for name in sorted(stored.keys() | present.keys())
        if stored.get(name) != present.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} was written by a run with other settings: {'; '.join(differing)}. Resume with the same settings, "
            "or start a new run in another --output_dir."
        )
    return json.loads((path / _HISTORY).read_text(encoding="utf-8"))


def open_folder(accelerator: Accelerator, training: LoopSettings) -> Path | None:
    """Find the checkpoint to resume from, or else make the output folder of a new run."""
    folder = Path(training.output_dir)
    if training.resume_from_checkpoint:
        return find_checkpoint(training.resume_from_checkpoint, folder)
    if accelerator.is_main_process:
        prepare_folder(folder, overwrite=training.overwrite_output_dir)
    accelerator.wait_for_everyone()
    return None


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Make the output folder of a new run.

    Raises:
        ValueError: If it holds checkpoints of an earlier run and may not be overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = checkpoints(folder)
    if found and not overwrite:
        raise ValueError(
            f"--output_dir {folder} holds {found[-1].name} of an earlier run. Continue it with "
            "--resume_from_checkpoint latest, start over with --overwrite_output_dir, or name another folder."
        )
    remove_checkpoints(folder)


def remove_checkpoints(folder: Path) -> None:
    """Delete all checkpoints in ``folder``."""
    for path in checkpoints(folder):
        shutil.rmtree(path)
