"""``GraphedStep``: whole training steps as CUDA graphs, one for each shape of batch."""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_comera.modules.halves_cache import note_parameter_edit
from hf_comera.ops.fused_loss import fixed_shapes
from hf_comera.training.cuda_graphs.capture import CudaCapture, DeviceRates, why_not_captured
from hf_comera.training.cuda_graphs.static_batch import PaddingBuckets, StaticBatch, pad_values_of
from hf_comera.training.ranks.adapter import RankAdapter
from hf_comera.training.ranks.gates import find_ddp

__all__ = ["GraphedStep", "check_graphable", "check_number", "check_trainer_graphs"]

logger = logging.getLogger(__name__)

MAX_GRAPHS = 32
"""Of one :class:`GraphedStep` at a time: each holds memory, and costs steps to warm up."""

ComputeLoss = Callable[[dict[str, Any]], Tensor]


@dataclass
class _Plan:
    """The state for batches of one shape."""

    batch: StaticBatch
    num_warm: int = 0
    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    replay: Callable[[], None] | None = None


class GraphedStep:
    """One call is one training step; from the fourth of a shape on it is a replay of a CUDA graph.

    ::

        step = GraphedStep(model, optimizer, adapter, buckets=(64, 128))
        for batch in batches:
            loss = step(batch)
            scheduler.step()

    A step is the forward and backward pass, clipping, ``adapter.before_step``, the step of the optimizer,
    ``adapter.after_step`` and ``zero_grad``; call none of these yourself. The first steps of each shape run as usual,
    on the stream that is recorded later: they are real steps, so nothing has to be put back afterwards. Learning
    rates are read for each step. Pruning, the next stage of rank adaptation and a loaded optimizer state
    have graphs recorded again.

    The step runs as usual on a CPU, with an optimizer that cannot be recorded, and after a recording that failed. So
    it does for a batch with fewer rows than others, and for a sequence longer than the largest bucket. Each reason is
    reported once, and counted in :attr:`eager_steps`.

    Hooks of modules and of the optimizer's step do not run in replays. After changing frozen parameters for other
    tensors, the modes of single layers, or to smaller batches, call :meth:`reset`.

    Args:
        model: The model, in one process: in DDP, FSDP or DeepSpeed it is refused.
        optimizer: :class:`hf_comera.TTMuon`, :class:`hf_comera.CoatAdamW`, or one of torch made with
            ``capturable=True`` or ``fused=True``; or Accelerate's wrapper around it, without accumulation and without
            a scaler for fp16.
        adapter: Trains the ranks, of the same optimizer; or None.
        buckets: Lengths to pad sequences to; None for batches that come in few shapes anyway.
        pad_values: What to pad the tensors of a batch with, besides the usual names of Transformers; None for one of
            two or more axes without a sequence.
        max_grad_norm: Gradients are clipped to this norm; None leaves them as they are.
        compute_loss: From a batch to the loss; default: ``model(**batch).loss``.
        generators: Random number generators of the model's own, besides that of the device.
        num_warmup_steps: Steps of each shape before it is recorded.

    Raises:
        ValueError: If the model or the optimizer is one of those that are refused, the adapter is of another
            optimizer, or a setting is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        adapter: RankAdapter | None = None,
        *,
        buckets: Sequence[int] | None = None,
        pad_values: Mapping[str, float | None] | None = None,
        max_grad_norm: float | None = None,
        compute_loss: ComputeLoss | None = None,
        generators: Sequence[torch.Generator] = (),
        num_warmup_steps: int = 3,
    ) -> None:
        check_graphable(model, optimizer, adapter)
        check_number("max_grad_norm", max_grad_norm, example=1.0)
        check_number("num_warmup_steps", num_warmup_steps, example=3)
        self.model, self.adapter = model, adapter
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self.padding = PaddingBuckets(buckets, pad_values_of(model, pad_values))
        self.max_grad_norm, self.num_warmup_steps = max_grad_norm, num_warmup_steps
        self.compute_loss: ComputeLoss = compute_loss or self._loss_of_model
        self.device = next(parameter.device for parameter in model.parameters())
        self.reason = CudaCapture.why_not(self.device) or why_not_captured(self.optimizer)
        """Why there is no graph for any step; None if there may be."""
        self.eager_steps: Counter[str] = Counter()
        """Steps that ran as usual, by reason."""
        self.num_warmups = self.num_captures = self.num_replays = 0
        self.grad_norm: Tensor | None = None
        """Of the last step, before clipping; None without ``max_grad_norm``."""
        self._plans: dict[Any, _Plan] = {}
        self._largest_rows = 0
        self._capture = None if self.reason else CudaCapture(self.device, generators)
        self._holds_for = self._held()
        self._rates = DeviceRates(self.optimizer, self.device)
        self._watch_for_loading()

    @property
    def num_eager(self) -> int:
        """Steps that ran as usual, those that warm up not counted."""
        return sum(self.eager_steps.values())

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """Train on ``batch``: the arguments of the model, tensors on any device.

        Returns:
            The loss, without a gradient.
        """
        if self.adapter is not None:
            self.adapter.prepare_step()
        reason, plan = self.reason, None
        if reason is None:
            reason, plan = self._find_plan(self.padding.complete(batch))
        if plan is not None and plan.replay is None and plan.num_warm >= self.num_warmup_steps:
            reason = self._record(plan)
        loss = self._eagerly(batch, reason) if plan is None or reason is not None else self._by_plan(plan)
        if self.adapter is not None:
            self.adapter.advance()
        return loss

    def reset(self) -> None:
        """Let go of all graphs and of the size of batches; steps are recorded again, after some that warm up."""
        self._plans.clear()
        self._largest_rows = 0
        if self._capture is not None:
            self._capture.forget()
        self._holds_for = self._held()
        self._rates = DeviceRates(self.optimizer, self.device)

    def _watch_for_loading(self) -> None:
        """A state that is loaded into the optimizer is made of other tensors."""
        own = weakref.ref(self)
        self.optimizer.register_load_state_dict_post_hook(lambda _: step.reset() if (step := own()) else None)

    def _find_plan(self, batch: dict[str, Any]) -> tuple[str | None, _Plan | None]:
        """The plan for ``batch``, filled with it; or why there is none."""
        if self._holds_for != self._held():
            self.reset()
        shapes = self.padding.shapes(batch)
        if shapes is None:
            return "a sequence is longer than the largest bucket", None
        rows = max((shape[0] for shape in shapes.values() if shape), default=0)
        self._largest_rows = max(rows, self._largest_rows)
        if rows < self._largest_rows:
            return "the batch has fewer rows than others", None
        try:
            key = (*self._situation(), *((name, shapes.get(name), _kind(batch[name])) for name in sorted(batch)))
            plan = self._plans.get(key)
        except TypeError:  # not hashable
            return "the batch holds more than tensors and numbers", None
        if plan is None and len(self._plans) >= MAX_GRAPHS:
            return f"there are {MAX_GRAPHS} graphs for other shapes or settings already; use fewer buckets", None
        if plan is None:
            plan = self._plans[key] = _Plan(StaticBatch(batch, shapes, self.padding.pad_values, self.device))
        plan.batch.fill(batch)
        self._rates.update()
        return None, plan

    def _record(self, plan: _Plan) -> str | None:
        """Record the step of ``plan``; returns why that failed, if it did."""
        assert self._capture is not None
        self._drop_gradients()  # gradients then are made within the graph, not added to
        try:
            plan.replay = self._capture.record(lambda: self._run(plan))
        except RuntimeError as error:
            self._drop_gradients()
            self._plans.clear()
            self.reason = f"recording a step failed with {type(error).__name__}: {error}"
            return self.reason
        self.num_captures += 1
        return None

    def _by_plan(self, plan: _Plan) -> Tensor:
        """One step on the batch that ``plan`` was filled with."""
        assert self._capture is not None
        if plan.replay is None:
            self._capture.warm_up(lambda: self._run(plan))
            plan.num_warm += 1
            self.num_warmups += 1
        else:
            plan.replay()
            note_parameter_edit()
            self.num_replays += 1
        assert plan.loss is not None
        self.grad_norm = None if plan.grad_norm is None else plan.grad_norm.clone()
        return plan.loss.clone()

    def _eagerly(self, batch: Mapping[str, Any], reason: str | None) -> Tensor:
        """One step as usual, counted."""
        assert reason is not None
        self.eager_steps[reason] += 1
        if self.eager_steps[reason] == 1:
            logger.warning(
                "A training step runs without a CUDA graph: %s. Further ones for this reason are only counted, in "
                "GraphedStep.eager_steps.", reason,
            )  # fmt: skip
        moved = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        if self.reason is None:
            self._rates.update()
        loss, self.grad_norm = self._body(moved)
        return loss

    def _run(self, plan: _Plan) -> None:
        """The step that is recorded: from static tensors into static tensors."""
        loss, grad_norm = self._body(dict(plan.batch.values))
        if plan.loss is None:
            plan.loss = torch.empty_like(loss)
            plan.grad_norm = None if grad_norm is None else torch.empty_like(grad_norm)
        plan.loss.copy_(loss)
        if plan.grad_norm is not None and grad_norm is not None:
            plan.grad_norm.copy_(grad_norm)

    def _body(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """All of a step that the device does."""
        with self._as_recorded() if self.reason is None else nullcontext():
            loss, grad_norm = self.compute_loss(batch), None
            loss.backward()
            if self.max_grad_norm is not None:
                grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            if self.adapter is not None:
                self.adapter.before_step(loss)
            self.optimizer.step()
            if self.adapter is not None:
                self.adapter.push()
            self._drop_gradients()
        return loss.detach(), grad_norm

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """Rates on the device, and sizes that no label decides: steps that are not recorded have the same numbers."""
        with self._rates.in_place(), fixed_shapes():
            yield

    def _drop_gradients(self) -> None:
        """Of the model, and of what the optimizer holds besides, say a loss with weights of its own."""
        self.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)

    def _loss_of_model(self, batch: dict[str, Any]) -> Tensor:
        loss: Tensor | None = self.model(**batch).loss
        if loss is None:
            raise ValueError(
                f"{type(self.model).__name__} returned no loss for a batch of {sorted(batch)}. Add labels to the "
                "batch, or give compute_loss=lambda batch: ..."
            )
        return loss

    def _situation(self) -> tuple[Any, ...]:
        """Settings that a graph depends on besides the batch, and that may come back."""
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        settings = tuple(
            tuple(
                (key, value) for key, value in group.items() if isinstance(value, int | float | tuple) and key != "lr"
            )
            for group in self.optimizer.param_groups
        )
        return self.model.training, autocast, settings

    def _held(self) -> list[Any]:
        """Settings that a graph depends on and that do not come back: the stage, and the addresses it writes."""
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        stage = [] if self.adapter is None else [self.adapter.stage]
        state = [] if self.adapter is None else self.adapter.device_state()
        return stage + [tensor.data_ptr() for tensor in held + state]


def _kind(value: Any) -> Any:
    """The property of a batch entry that a graph is bound to: the dtype of a tensor, or the value itself."""
    return value.dtype if isinstance(value, Tensor) else value


def check_graphable(model: nn.Module, optimizer: torch.optim.Optimizer, adapter: RankAdapter | None) -> None:
    """Refuse what :class:`GraphedStep` cannot train rightly.

    Raises:
        ValueError: If the model is spread over processes, the optimizer accumulates gradients or scales losses, or
            the adapter is of another optimizer.
    """
    spread = _spread_over(model)
    if spread is not None:
        raise ValueError(
            f"The model is in {spread}, whose communication GraphedStep does not record. Pass the bare model in a "
            "single process, or train without GraphedStep."
        )
    if getattr(optimizer, "scaler", None) is not None:
        raise ValueError(
            "The optimizer scales losses for fp16 (mixed_precision='fp16') and asks on the host whether a step "
            "counts, which a CUDA graph cannot. Use mixed_precision='bf16'."
        )
    steps = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={steps} is set in the Accelerator, but a call of GraphedStep is a whole "
            f"step. Use gradient_accumulation_steps=1 and batches {steps} times as large."
        )
    inner = getattr(optimizer, "optimizer", optimizer)
    if adapter is not None and adapter.optimizer is not inner:
        raise ValueError(
            f"adapter is of another optimizer ({type(adapter.optimizer).__name__}) than the one given "
            f"({type(inner).__name__}). Make it of the same: RankAdapter(model, optimizer, ...)."
        )


def check_number(name: str, value: float | None, *, example: float) -> None:
    """Refuse a setting that is not positive, nor None.

    Raises:
        ValueError: If it is neither.
    """
    wanted = int if isinstance(example, int) else int | float
    if value is not None and (isinstance(value, bool) or not isinstance(value, wanted) or not value > 0):
        raise ValueError(f"{name}={value!r} is needed as a positive number, for example {name}={example}.")


def check_trainer_graphs(args: Any, cuda_graphs: bool, padding_buckets: Any) -> None:
    """Refuse training arguments with which a Trainer cannot use CUDA graphs.

    Raises:
        ValueError: If there is such an argument, or there are buckets without graphs.
    """
    if not cuda_graphs:
        if padding_buckets is not None:
            raise ValueError(
                f"padding_buckets={padding_buckets!r} is only for CUDA graphs, and cuda_graphs={cuda_graphs}. Set "
                "cuda_graphs=True, or leave padding_buckets out."
            )
        return
    refused = {
        "gradient_accumulation_steps": (1, "Use 1, and a larger per_device_train_batch_size."),
        "fp16": (False, "Its scaler asks on the host whether a step counts. Use bf16=True."),
        "world_size": (1, "Communication is not recorded. Train in one process, or with cuda_graphs=False."),
        "fsdp": (None, "Communication is not recorded. Use cuda_graphs=False, or no FSDP."),
        "deepspeed": (None, "DeepSpeed steps by itself. Use cuda_graphs=False, or no DeepSpeed."),
        "torch_compile": (False, "It would record graphs of its own. Use one of both."),
    }
    for name, (wanted, advice) in refused.items():
        value = getattr(args, name, wanted)
        if value != wanted and value:
            raise ValueError(f"cuda_graphs=True does not work with {name}={value!r}, only with {wanted}. {advice}")
    if args.n_gpu > 1:
        raise ValueError(
            f"cuda_graphs=True needs one GPU, but this process would use {args.n_gpu} (DataParallel). Set "
            "CUDA_VISIBLE_DEVICES to one of them."
        )


def _spread_over(model: nn.Module) -> str | None:
    """The name of what spreads the model over processes, if anything does."""
    if find_ddp(model) is not None:
        return "DistributedDataParallel"
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        return "FSDP (its parameters are sharded)"
    names = {type(module).__name__ for module in (model, getattr(model, "module", model))}
    return next(iter(names & {"FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"}), None)
