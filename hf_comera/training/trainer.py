"""``ComeraTrainer``: the Trainer of Transformers with the optimizer that tensor trains need, and rank adaptation."""

import functools
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerState, TrainingArguments

from hf_comera.optim import TTMuon
from hf_comera.optim.tt_muon import TTMuonState
from hf_comera.training.callback import ComeraCallback
from hf_comera.training.graph_guards import check_trainer_graphs
from hf_comera.training.graphed_step import GraphedStep
from hf_comera.training.pruning import drop_removed_when_loading
from hf_comera.training.rank_adaptation import RankAdaptation
from hf_comera.training.rank_adapter import RankAdapter
from hf_comera.training.rank_gates import add_rank_gates
from hf_comera.training.trainer_checkpoints import checkpoint_to_resume, writing_for_trainer

__all__ = ["ComeraTrainer", "ComeraTrainerMixin"]

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
        """What trains the ranks, if they are trained; resuming may put another one in."""
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
        own = self.optimizer
        if not isinstance(getattr(own, "optimizer", own), TTMuon):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state_dict = own.state_dict
        own.state_dict = lambda: TTMuonState(state_dict())  # type: ignore[method-assign]
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
        """What the loop does to gradients and optimizer after :meth:`training_step` has been done by ``step``."""
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
