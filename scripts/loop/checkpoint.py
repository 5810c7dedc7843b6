"""Checkpoints to continue from, number for number: written whole or not at all, read only by the run they are of."""

import base64
import hashlib
import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor

from hf_comera.training.whole_checkpoint import (
    MANIFEST,
    UNFINISHED,
    checkpoint_step,
    checkpoints,
    damage,
    drop_old,
    newest_whole,
    writing,
)
from loop.settings import LoopSettings

logger = logging.getLogger(__name__)
SETTINGS = "run_settings.json"
"""All that decides the numbers of a run, in each of its checkpoints."""

_STATES, _HISTORY = "states.json", "history.json"
STATES = (_HISTORY, _STATES)
"""Files of a checkpoint of :func:`save_checkpoint` without which no run goes on, besides its settings."""

# What a run may change on its way without changing its numbers.
FREE_SETTINGS = frozenset({
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "checkpointing_steps", "save_total_limit",
    "logging_steps", "dataloader_num_workers", "preprocessing_num_workers", "speed_comparison_steps",
    "with_tracking", "report_to", "push_to_hub", "hub_model_id", "hub_private_repo", "use_cpu", "num_threads",
    "num_train_epochs", "max_train_steps",  # the number of steps that follows from them must be the same
    "train_file", "validation_file", "test_file", "data_file", "fold_column", "dataset_name",
    "results_file", "model_name_or_path", "config_name", "tokenizer_name",
})  # fmt: skip


def random_states(device: torch.device) -> dict[str, Any]:
    """The present states, that of ``device`` among them.

    Args:
        device: What this process computes on.
    """
    version, numbers, gauss = random.getstate()
    name, keys, *others = np.random.get_state()
    states = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), *others],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type != "cpu":
        states[device.type] = _text(torch.get_device_module(device).get_rng_state())
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Draw from here on as after :func:`random_states`; a device of another type than then draws on as it is."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *others = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *others))
    torch.set_rng_state(_tensor(states["torch"]))
    if device.type in states:
        torch.get_device_module(device).set_rng_state(_tensor(states[device.type]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


class Stateful(Protocol):
    """Something whose state JSON can hold, such as a schedule or the adaptation of ranks."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


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


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    step: int,
    *,
    identity: dict[str, Any],
    history: dict[str, Any],
    stateful: Mapping[str, Stateful],
    keep: int,
) -> Path:
    """Write everything needed to continue after ``step``, and drop all but the newest ``keep`` checkpoints.

    An interruption leaves no half checkpoint (:mod:`hf_comera.training.whole_checkpoint`).

    Raises:
        OSError: If it cannot be written; those before it stay.
    """
    final = folder / f"checkpoint-{step}"
    # It warns of weights that are tied, as those of every masked language model are; loading ties them again.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    is_main, wait = accelerator.is_main_process, accelerator.wait_for_everyone
    with writing(final, is_main=is_main, wait=wait, step=step) as unfinished:
        accelerator.save_state(str(unfinished))
        own = accelerator.process_index
        (unfinished / f"random_states_{own}.pkl").unlink(missing_ok=True)  # JSON below: Accelerate skips a bad one
        _write(unfinished / f"random_states_{own}.json", random_states(accelerator.device))
        if is_main:
            _write(unfinished / SETTINGS, identity)
            _write(unfinished / _STATES, {name: holder.state_dict() for name, holder in stateful.items()})
            _write(unfinished / _HISTORY, history)
    if is_main:
        drop_old(final, keep)
    wait()
    return final


def load_checkpoint(accelerator: Accelerator, path: Path, stateful: Mapping[str, Stateful]) -> None:
    """Bring model, optimizer, ``stateful`` and random numbers to where they were; nothing that is read is run.

    Raises:
        ValueError: If the optimizer's state holds something that would be.
    """
    try:
        accelerator.load_state(str(path))  # reads with weights_only; random numbers, which it lacks, it passes over
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The state of the optimizer in {path} holds more than tensors and numbers, so it is not read: it could "
            "run code. It is not of this script: resume from a checkpoint that you trust."
        ) from error
    states = _read(path / _STATES)
    for name, holder in stateful.items():
        holder.load_state_dict(states[name])
    set_random_states(_read(path / f"random_states_{accelerator.process_index}.json"), accelerator.device)


def restore_folder(checkpoint: Path, kept_folder: Path) -> None:
    """Bring ``kept_folder`` to the state it had when the checkpoint was written."""
    if PartialState().is_main_process:
        shutil.rmtree(kept_folder, ignore_errors=True)
        if (checkpoint / kept_folder.name).is_dir():
            shutil.copytree(checkpoint / kept_folder.name, kept_folder)
    PartialState().wait_for_everyone()


def find_checkpoint(wanted: str, folder: Path, command: Callable[[Path], str], needed: Sequence[str] = STATES) -> Path:
    """The checkpoint called ``wanted``: a folder, or "latest" for the newest whole one in ``folder``.

    Args:
        wanted: What ``--resume_from_checkpoint`` says.
        folder: That of the run.
        command: Of a checkpoint, the command that resumes from it.
        needed: Files without which the script cannot go on, besides the settings.

    Raises:
        ValueError: If there is none, or a file of it is damaged, missing or of something else.
    """
    flaw_of = partial(_flaw, needed=needed)
    if wanted == "latest":
        newest, flaws = newest_whole(folder, flaw_of)
        if newest is None:
            raise ValueError(_none_to_resume(folder, flaws))
        for flaw in flaws if os.environ.get("LOCAL_RANK", "0") == "0" else ():  # all processes look
            logger.warning("Passed over, since %s.", flaw)
        return newest
    path = Path(wanted)
    if not (path / MANIFEST).is_file() and not (path / needed[0]).is_file():
        names = ", ".join(map(str, checkpoints(folder))) or f"none in {folder}"
        raise ValueError(f"--resume_from_checkpoint {wanted} is not a checkpoint of this script. There are: {names}.")
    flaw = flaw_of(path)
    if flaw is not None:
        is_numbered = path in checkpoints(path.parent)
        before, _ = newest_whole(path.parent, flaw_of, below=checkpoint_step(path) if is_numbered else None)
        way = f"The newest whole one before it:\n  {command(before)}" if before else "None before it is whole."
        raise ValueError(f"--resume_from_checkpoint {wanted}: {flaw}. {way}")
    return path


def _flaw(path: Path, needed: Sequence[str]) -> str | None:
    """What keeps a run from being resumed from a checkpoint, or None."""
    if not (path / MANIFEST).is_file() and (path / needed[0]).is_file():
        return (
            f"{path / MANIFEST} is missing: it was removed, or the checkpoint is of an earlier version of this "
            "script, whose states can run code when they are read. Only that version can go on from it"
        )
    found = damage(path)
    lacking = [name for name in (*needed, SETTINGS) if not (path / name).is_file()]
    if found is None and lacking:
        return f"{path} has no {lacking[0]}: it was not written by this script"
    return found


def _none_to_resume(folder: Path, flaws: list[str]) -> str:
    if flaws:
        return (
            f"--resume_from_checkpoint latest: no checkpoint in {folder} is whole. {'; '.join(flaws)}. Start over "
            "with --overwrite_output_dir."
        )
    return (
        f"--resume_from_checkpoint latest: {folder} has no checkpoint. Start without this setting, or name "
        "the folder the run was started with by --output_dir."
    )


def check_identity(path: Path, identity: dict[str, Any]) -> None:
    """Make sure that a checkpoint is of the same run.

    Raises:
        ValueError: If the checkpoint was written by a run with other settings or other data.
    """
    stored = _read(path / SETTINGS)
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


def read_history(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The history stored in a checkpoint of the same run.

    Raises:
        ValueError: If the checkpoint was written by a run with other settings or other data.
    """
    check_identity(path, identity)
    return _read(path / _HISTORY)


def open_folder(training: LoopSettings, command: Callable[[Path], str], needed: Sequence[str] = STATES) -> Path | None:
    """Find the checkpoint to resume from, or else make the output folder of a new run.

    Args:
        training: Names both.
        command: Of a checkpoint, the command that resumes from it.
        needed: Files without which the script cannot go on, besides the settings.
    """
    folder = Path(training.output_dir)
    if training.resume_from_checkpoint:
        return find_checkpoint(training.resume_from_checkpoint, folder, command, needed)
    if PartialState().is_main_process:
        prepare_folder(folder, overwrite=training.overwrite_output_dir)
    PartialState().wait_for_everyone()
    return None


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Make the output folder of a new run.

    Raises:
        ValueError: If it cannot be made, or holds checkpoints of an earlier run and may not be overwritten.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder} cannot be made ({error.strerror}: {error.filename}). Name a folder that can be "
            f"written, for example --output_dir {folder}-2."
        ) from error
    found = checkpoints(folder)
    if found and not overwrite:
        raise ValueError(
            f"--output_dir {folder} holds {found[-1].name} of an earlier run. Continue it with "
            "--resume_from_checkpoint latest, start over with --overwrite_output_dir, or name another folder."
        )
    remove_checkpoints(folder)


def remove_checkpoints(folder: Path) -> None:
    """Delete all checkpoints in ``folder``, and what was left of one that was being written."""
    for path in checkpoints(folder):
        shutil.rmtree(path)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
