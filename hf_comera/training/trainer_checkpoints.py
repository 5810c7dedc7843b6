"""Checkpoints of a Trainer: which one a training goes on from, and that each one it writes is whole."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import SaveStrategy

from hf_comera.training.whole_checkpoint import (
    MANIFEST,
    checkpoint_step,
    checkpoints,
    damage,
    drop_old,
    newest_whole,
    writing,
)

__all__ = ["checkpoint_to_resume", "writing_for_trainer"]

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"
"""Written last by Transformers."""

STATES = {"optimizer.pt": "*optimizer*", "scheduler.pt": "scheduler.pt", "rng_state.pth": "rng_state*.pth"}
"""What a training goes on from besides weights and step, and how it may be called; sharded optimizers are folders."""

_ANEW = "Start anew, from weights that are there by from_pretrained: trainer.train()."


def checkpoint_to_resume(trainer: Any, wanted: str | os.PathLike[str] | bool | None) -> str | bool | None:
    """What a Trainer is to resume from where ``wanted`` was asked for; what it refuses itself is left to it.

    Args:
        trainer: Whose output folder is searched if ``wanted`` is True: for the newest whole checkpoint.
        wanted: ``resume_from_checkpoint``.

    Raises:
        ValueError: If files of the checkpoint are damaged or missing, by name, or True was given and none is whole.
    """
    if wanted is None or wanted is False:
        return None
    flaw = partial(_flaw, has_states=not getattr(trainer, "is_deepspeed_enabled", False))  # that has files of its own
    told = logger.warning if trainer.args.should_log else logger.debug
    if wanted is True:
        chosen = _newest(Path(trainer.args.output_dir), flaw, told)
    else:
        chosen = Path(wanted) if Path(wanted).is_dir() else None
        if chosen is not None and (found := flaw(chosen)):
            raise ValueError(f"resume_from_checkpoint={str(wanted)!r}: {found}. {_way_out(chosen, flaw)}")
    if chosen is None:
        return True if wanted is True else str(wanted)
    if not (chosen / MANIFEST).is_file():
        told(
            "%s has no %s, so damage to its files is not found: another Trainer or an earlier version of hf_comera "
            "wrote it.", chosen, MANIFEST,
        )  # fmt: skip
    return str(chosen)


@contextmanager
def writing_for_trainer(trainer: Any, final: Path) -> Iterator[Path]:
    """Within, the Trainer writes into the folder that is given; then the checkpoint is whole, and old ones go.

    All processes call it. Transformers must not drop old checkpoints meanwhile: the new one is not whole yet.
    """
    args, state = trainer.args, trainer.state
    is_main, wait = args.should_save, trainer.accelerator.wait_for_everyone
    facts = {"step": state.global_step, "written_by": type(trainer).__name__}
    with writing(final, is_main=is_main, wait=wait, **facts) as unfinished:
        yield unfinished
        wait()
        _note_best(state, final, is_noted=args.save_strategy != SaveStrategy.NO)
        if is_main:
            state.save_to_json(str(unfinished / TRAINER_STATE))
    if is_main:
        drop_old(final, args.save_total_limit, state.best_model_checkpoint and Path(state.best_model_checkpoint))


def _note_best(state: TrainerState, final: Path, *, is_noted: bool) -> None:
    """As Transformers does, but by the place where the checkpoint will be."""
    if is_noted and state.best_global_step:
        best = final.with_name(f"checkpoint-{state.best_global_step}")
        if best == final or best.is_dir():
            state.best_model_checkpoint = str(best)


def _flaw(checkpoint: Path, *, has_states: bool) -> str | None:
    """What keeps a training from going on from a checkpoint, or None."""
    if (checkpoint / MANIFEST).exists() and (found := damage(checkpoint)):
        return found
    if not (checkpoint / TRAINER_STATE).is_file():
        return f"{checkpoint / TRAINER_STATE} is missing: no Trainer wrote the checkpoint, or not to its end"
    for name, pattern in STATES.items() if has_states else ():
        files = list(checkpoint.glob(pattern))
        if not files:
            return f"{checkpoint / name} is missing, which save_only_model=True leaves out"
        if empty := [path for path in files if path.is_file() and not path.stat().st_size]:
            return f"{empty[0]} has 0 bytes"
    return None


def _newest(folder: Path, flaw: Any, told: Any) -> Path | None:
    newest, flaws = newest_whole(folder, flaw)
    if newest is None and flaws:
        raise ValueError(
            f"resume_from_checkpoint=True: no checkpoint in {folder} can be resumed from. {'; '.join(flaws)}. {_ANEW}"
        )
    for found in flaws:
        told("Passed over, since %s. Training goes on from %s.", found, newest)
    return newest


def _way_out(checkpoint: Path, flaw: Any) -> str:
    """What can be resumed from instead."""
    is_numbered = checkpoint in checkpoints(checkpoint.parent)
    before, _ = newest_whole(checkpoint.parent, flaw, below=checkpoint_step(checkpoint) if is_numbered else None)
    if before is not None:
        return f"The newest whole one before it: resume_from_checkpoint={str(before)!r}."
    return f"None before it is whole. {_ANEW}"
