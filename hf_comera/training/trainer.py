"""``ComeraTrainer``: the Trainer of Transformers with the optimizer that tensor trains need, and rank adaptation."""

import functools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import SaveStrategy

from hf_comera.optim import TTMuon
from hf_comera.optim.tt_muon import TTMuonState
from hf_comera.training.cuda_graphs.step import GraphedStep, check_trainer_graphs
from hf_comera.training.ranks.adapter import RankAdapter
from hf_comera.training.ranks.callback import ComeraCallback
from hf_comera.training.ranks.gates import add_rank_gates
from hf_comera.training.ranks.pruning import drop_removed_when_loading
from hf_comera.training.ranks.settings import RankAdaptation
from hf_comera.training.whole_checkpoint import (
    MANIFEST,
    checkpoint_step,
    checkpoints,
    damage,
    drop_old,
    newest_whole,
    writing,
)

__all__ = ["ComeraTrainer", "ComeraTrainerMixin", "checkpoint_to_resume", "writing_for_trainer"]

logger = logging.getLogger(__name__)


class ComeraTrainerMixin:
    """For any Trainer, our optimizer and rank adaptation: ``class MyTrainer(ComeraTrainerMixin, Seq2SeqTrainer)``.

    With ``rank_adaptation=RankAdaptation(...)`` the ranks are trained too, as :class:`ComeraCallback` says.

    ``learning_rate`` (as for the dense model) and ``weight_decay`` of the training arguments apply, and for what is no
    core ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon``. Any other optimizer that is asked for, by ``optim`` in
    the arguments, by ``optimizers`` or by ``optimizer_cls_and_kwargs``, is used as in the original. ``optim`` at its
    default cannot be told from one that was left out: for that very AdamW, pass ``optimizer_cls_and_kwargs``.

    Checkpoints are written whole or not at all. ``train(resume_from_checkpoint=True)`` goes on from the newest whole
    one and says which it passed over; one that is named is refused if a file of it is damaged or missing.

    With ``cuda_graphs=True`` each training step is a call of :class:`GraphedStep`: a replay of a CUDA graph where that
    is possible. Gradients are gone when callbacks see the step. ``graphed_step`` then counts what ran how.

    Args:
        args: Of the Trainer.
        rank_adaptation: How ranks are trained; None leaves them as they are.
        cuda_graphs: Whether to replay training steps as CUDA graphs.
        padding_buckets: Lengths to pad sequences to, with CUDA graphs; None for batches that all have one shape.
        kwargs: Of the Trainer.

    Raises:
        ValueError: If training arguments do not go with CUDA graphs, such as accumulation of gradients or fp16.
    """

    args: TrainingArguments
    model: Any
    model_wrapped: Any
    callback_handler: Any
    state: TrainerState
    optimizer: torch.optim.Optimizer | None
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None

    accelerator: Any
    _writes_in: str | None = None
    """Where checkpoints go while one is being written."""

    def __init__(
        self,
        *args: Any,
        rank_adaptation: RankAdaptation | None = None,
        cuda_graphs: bool = False,
        padding_buckets: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if rank_adaptation is not None:
            kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), ComeraCallback(rank_adaptation)]
        super().__init__(*args, **kwargs)
        if sum(isinstance(callback, ComeraCallback) for callback in self.callback_handler.callbacks) > 1:
            raise ValueError(
                "Two would train the ranks: rank_adaptation and a ComeraCallback, or two ComeraCallbacks. Give one."
            )
        check_trainer_graphs(self.args, cuda_graphs, padding_buckets)
        self.cuda_graphs, self.padding_buckets = cuda_graphs, padding_buckets
        self.graphed_step: GraphedStep | None = None
        self._connect()

    @property
    def rank_callback(self) -> ComeraCallback | None:
        """The callback that trains the ranks, if they are trained; resuming may put another one in."""
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, ComeraCallback)), None)

    def _connect(self) -> None:
        if self.rank_callback is not None:
            self.rank_callback.wrapped_model = lambda: self.model_wrapped

    def _load_callback_state(self) -> None:
        super()._load_callback_state()  # type: ignore[misc]
        self._connect()

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint: A folder, or True for the newest whole one in ``output_dir``.
            args: Of the Trainer.
            kwargs: Of the Trainer.

        Raises:
            ValueError: If a file of the checkpoint is damaged or missing.
            OSError: If a checkpoint cannot be written; those before it are whole.
        """
        return super().train(checkpoint_to_resume(self, resume_from_checkpoint), *args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        final = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        with writing_for_trainer(self, final) as unfinished:
            self._writes_in = str(unfinished.parent)
            try:
                super()._save_checkpoint(model, trial, *args, **kwargs)  # type: ignore[misc]
            finally:
                self._writes_in = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own: Any = self.optimizer
        if not isinstance(getattr(own, "optimizer", own), TTMuon):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state_dict = own.state_dict
        own.state_dict = lambda: TTMuonState(state_dict())
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            del own.state_dict

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._writes_in is None else self._writes_in  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writes_in is None:  # what is uploaded, in a thread, has to stay where it is
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Record ``logs``, and with the training loss the figures of the ranks."""
        if self.rank_callback is not None and self.rank_callback.adapter is not None and "loss" in logs:
            logs = {**logs, **self.rank_callback.adapter.logs()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Set up the optimizer, unless there is one."""
        is_new = self.optimizer is None
        if self.rank_callback is not None and is_new:
            add_rank_gates(self.model if model is None else model)  # with model_init, the model is a new one
        default = TrainingArguments.__dataclass_fields__["optim"].default
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and self.args.optim == default:
            self.optimizer = TTMuon(
                self.model if model is None else model,
                self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
            logger.info(
                "Optimizer: TTMuon at learning rate %g. For another one set optim or optimizer_cls_and_kwargs.",
                self.args.learning_rate,
            )
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if self.rank_callback is not None and is_new:
            drop_removed_when_loading(optimizer)  # a checkpoint is loaded before training begins
        return optimizer

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One batch forward and backward, rank adaptation takes note of its loss; with CUDA graphs a whole step."""
        if self.cuda_graphs:
            return self._step_by_graph(model, *args, **kwargs)
        loss: torch.Tensor = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        if self.rank_callback is not None:
            self.rank_callback.observe(loss)
        return loss

    def _step_by_graph(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if not model.training:
            model.train()
        batch = dict(self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        if num_items_in_batch is not None:
            batch["num_items_in_batch"] = torch.as_tensor(num_items_in_batch)
        assert isinstance(self.optimizer, AcceleratedOptimizer)
        adapter = None if self.rank_callback is None else self.rank_callback.adapter
        step = self.graphed_step
        if step is None or step.optimizer is not self.optimizer.optimizer or step.adapter is not adapter:
            step = self.graphed_step = self._make_graphed_step(model, adapter)
        return step(batch)

    def _make_graphed_step(self, model: Any, adapter: RankAdapter | None) -> GraphedStep:
        """The step, and a training loop that leaves to it what it does."""

        def compute_loss(batch: dict[str, Any]) -> torch.Tensor:
            num_items = batch.pop("num_items_in_batch", None)
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                loss: torch.Tensor = self.compute_loss(model, batch, num_items_in_batch=num_items)  # type: ignore[attr-defined]
            return loss

        assert self.optimizer is not None
        step = GraphedStep(
            model,
            self.optimizer,
            adapter,
            buckets=self.padding_buckets,
            max_grad_norm=self.args.max_grad_norm or math.inf,  # the norm is logged anyway
            compute_loss=compute_loss,
        )
        if self.rank_callback is not None:
            self.rank_callback.by_graph = True
        self._leave_out_of_the_loop(step)
        return step

    def _leave_out_of_the_loop(self, step: GraphedStep) -> None:
        """Skip the loop's own work on gradients and optimizer after :meth:`training_step`: ``step`` has done it."""
        optimizer: Any = self.optimizer

        @functools.wraps(optimizer.step)  # schedulers look for the mark that they left on it
        def was_stepped(*_: Any, **__: Any) -> None:
            optimizer._opt_called = True

        optimizer.step = was_stepped
        self.accelerator.clip_grad_norm_ = lambda *_, **__: step.grad_norm


class ComeraTrainer(ComeraTrainerMixin, Trainer):
    """The Trainer of Transformers; compressed models are trained with :class:`hf_comera.TTMuon`.

    See :class:`ComeraTrainerMixin` for what decides about the optimizer.
    """


TRAINER_STATE = "trainer_state.json"
"""Written last by Transformers."""

STATES = {"optimizer.pt": "*optimizer*", "scheduler.pt": "scheduler.pt", "rng_state.pth": "rng_state*.pth"}
"""State that a training resumes from besides weights and step, and its file names; sharded optimizers are folders."""

_START_OVER = "Start from step 0, with existing weights by from_pretrained: trainer.train()."


def checkpoint_to_resume(trainer: Any, wanted: str | os.PathLike[str] | bool | None) -> str | bool | None:
    """The checkpoint that a Trainer resumes from for ``wanted``; cases that it refuses itself are left to it.

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
    """The reason why a training cannot resume from a checkpoint, or None."""
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
            f"resume_from_checkpoint=True: no checkpoint in {folder} can be resumed from. {'; '.join(flaws)}. "
            f"{_START_OVER}"
        )
    for found in flaws:
        told("Passed over, since %s. Training goes on from %s.", found, newest)
    return newest


def _way_out(checkpoint: Path, flaw: Any) -> str:
    """The checkpoint to resume from instead, in a sentence."""
    is_numbered = checkpoint in checkpoints(checkpoint.parent)
    before, _ = newest_whole(checkpoint.parent, flaw, below=checkpoint_step(checkpoint) if is_numbered else None)
    if before is not None:
        return f"The newest whole one before it: resume_from_checkpoint={str(before)!r}."
    return f"None before it is whole. {_START_OVER}"
