"""``ComeraCallback``: rank adaptation in any Trainer of Transformers."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_comera.training.ranks.adapter import RankAdapter
from hf_comera.training.ranks.gates import add_rank_gates
from hf_comera.training.ranks.importance import gated_layers
from hf_comera.training.ranks.pruning import drop_removed_when_loading
from hf_comera.training.ranks.settings import RankAdaptation, check_adaptation

__all__ = ["ComeraCallback"]

logger = logging.getLogger(__name__)


class ComeraCallback(TrainerCallback, ExportableState):
    """Trains the ranks of the model that a Trainer trains; :class:`ComeraTrainer` puts one in by itself.

    Gates are added when the Trainer is made, so that its optimizer holds them. The state is part of every checkpoint,
    and resuming from one goes on exactly. When training ends, the model has the wanted size and no gates.

    With a plain Trainer the loss of the steps is read from the outputs of the model, so batches need labels. An
    optimizer that suits cores is ``optimizer_cls_and_kwargs=(TTMuon, {"model": model, "lr": 1e-3})``, made after
    ``add_rank_gates(model)``. Where whole layers are removed, groups of parameters in ``optimizer_cls_and_kwargs``
    cannot be resumed, since a callback cannot see the loading of an optimizer that is made so late. Pass the optimizer
    itself instead (``optimizers``).

    Args:
        rank_adaptation: The settings.

    Raises:
        ValueError: When the Trainer is made, if its model is not compressed; when training begins, for whatever
            :class:`RankAdapter` refuses, and for several processes with another Trainer than ``ComeraTrainer``.
    """

    def __init__(self, rank_adaptation: RankAdaptation | dict[str, Any]) -> None:
        if isinstance(rank_adaptation, dict):  # from the state of a checkpoint
            rank_adaptation = RankAdaptation(**rank_adaptation)
        self.settings = check_adaptation(rank_adaptation)
        self.adapter: RankAdapter | None = None
        self.wrapped_model: Callable[[], nn.Module] | None = None
        """Set by our Trainer, which also calls :meth:`observe`: the model that the loop calls, maybe in DDP."""
        self.by_graph = False
        """Set by our Trainer: its steps, which may be CUDA graphs, call the adapter themselves."""
        self.saved_state: dict[str, Any] | None = None
        self._loss: Tensor | None = None
        self._micro_batches = 0
        self._hook: Any = None

    def state(self) -> dict[str, Any]:
        """The entry in ``trainer_state.json``."""
        saved = self.saved_state if self.adapter is None else self.adapter.state_dict()
        return {"args": {"rank_adaptation": vars(self.settings)}, "attributes": {"saved_state": saved}}

    def on_init_end(
        self,
        args: TrainingArguments,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add the gates before the Trainer makes its optimizer; one that was given may have to resume."""
        add_rank_gates(model)
        if optimizer is not None:
            drop_removed_when_loading(optimizer)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make the adapter, and put it where a resumed training stands."""
        self._check(args, model)
        wrapped = model if self.wrapped_model is None else self.wrapped_model()
        self.adapter = RankAdapter(wrapped, optimizer, self.settings, total_steps=state.max_steps)
        if state.global_step > 0:
            self.adapter.load_state_dict(self._stored(state))
        if self.wrapped_model is None:
            if self._hook is not None:  # of a training that an error ended
                self._hook.remove()
            self._hook = model.register_forward_hook(self._read_loss, with_kwargs=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are complete and clipped."""
        assert self.adapter is not None
        if self.by_graph:
            return
        if self._loss is None:
            raise ValueError(
                "ComeraCallback found no loss in the outputs of the model: the batches have no labels, or the loss is "
                "computed outside. Use ComeraTrainer(rank_adaptation=...), which sees the loss of every step."
            )
        self.adapter.before_step(self._loss / max(self._micro_batches, 1))
        self._loss, self._micro_batches = None, 0

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The optimizer has stepped; evaluation and checkpoints come after this."""
        assert self.adapter is not None
        if not self.by_graph:
            self.adapter.after_step()

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add the figures of the ranks to every record of the training loss, where the Trainer is not ours.

        Trackers that were there before this callback do not see them: those of ``report_to``, unless this one is
        moved to the front (``docs/ranks.md``).
        """
        if self.adapter is not None and logs is not None and "loss" in logs and "live_ranks" not in logs:
            figures = self.adapter.logs()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Meet the wanted size and fold the gates."""
        assert self.adapter is not None
        if self._hook is not None:
            self._hook.remove()
        self.adapter.finish()
        sizes = self.adapter.history.parameters
        logger.info("Rank adaptation: %s parameters before, %s after.", f"{sizes[0]:,}", f"{sizes[-1]:,}")
        self.saved_state, self.adapter = self.adapter.state_dict(), None

    def observe(self, loss: Tensor) -> None:
        """Add the loss of one accumulated batch, already divided as its gradients are."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def _read_loss(self, model: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        """Without our Trainer: the loss from the outputs; a mean of batches unless the model divides by all tokens."""
        loss = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
        if not model.training or not torch.is_grad_enabled() or loss is None:
            return
        self.observe(loss)
        self._micro_batches += kwargs.get("num_items_in_batch") is None

    def _check(self, args: TrainingArguments, model: nn.Module) -> None:
        if self.saved_state is not None and not gated_layers(model):
            raise ValueError(
                "This Trainer has trained the ranks of its model already: gates are folded, and its optimizer has "
                "none. To train on, make a new Trainer of the model, with rank_adaptation only if ranks are to change."
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"One process would spread the batch over {args.n_gpu} GPUs (DataParallel), where the loss of a step "
                "comes in parts. Start one process a GPU: accelerate launch or torchrun."
            )
        if self.wrapped_model is None and args.world_size > 1:
            raise ValueError(
                "ComeraCallback cannot re-arrange a model in DDP from within a plain Trainer. With several processes "
                "use ComeraTrainer(rank_adaptation=...), or a Trainer of your own with ComeraTrainerMixin."
            )
        if args.load_best_model_at_end and self.settings.has_target:
            raise ValueError(
                "load_best_model_at_end=True may bring back a checkpoint from before the wanted size was reached. Set "
                "it to False, and pick among the checkpoints that have that size."
            )

    def _stored(self, state: TrainerState) -> dict[str, Any]:
        callbacks: Any = state.stateful_callbacks or {}  # annotated as the list that the state was made of
        stored = callbacks.get(type(self).__name__)
        stored = stored[-1] if isinstance(stored, list) and stored else stored
        saved = ((stored or {}).get("attributes") or {}).get("saved_state")
        if saved is None:
            raise ValueError(
                f"The checkpoint of step {state.global_step} was written without rank adaptation, so its stages "
                "cannot be resumed. Start from step 0 with its weights: from_pretrained, then train without resuming."
            )
        return saved
