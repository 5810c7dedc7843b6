"""``RankAdapter``: rank adaptation beside any training loop, two calls a step."""

import copy
import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_comera.compress.reports import RankHistory, size_report
from hf_comera.modules import TensorTrainModule
from hf_comera.training.ranks.budget import (
    check_budget,
    choose_ranks,
    core_budget,
    core_parameters,
    ungated_parameters,
    warn_of_small_model,
)
from hf_comera.training.ranks.gates import bare_model, check_gates, find_ddp, fold_rank_gates, gate_rate, rewrap
from hf_comera.training.ranks.importance import (
    BondTable,
    bond_effects,
    exact_size,
    late_weight,
    rank_importance,
    relative_push,
    relaxed_size,
    shrink,
)
from hf_comera.training.ranks.pruning import (
    check_moments,
    cut_ranks,
    drop_removed,
    drop_removed_when_loading,
    to_canonical_basis,
)
from hf_comera.training.ranks.settings import RankAdaptation, check_adaptation

__all__ = [
    "RankAdapter",
    "agree_on_bases",
    "agreed",
    "check_ranks_of_state",
    "check_state",
    "only_gathers",
    "unscale",
    "was_skipped",
]

logger = logging.getLogger(__name__)

LOSS_MEMORY = 0.95
"""Decay a step of the smoothed loss: the last twenty steps or so, fewer than between prunings of a long training."""
EFFECT_MEMORY = 0.98
"""Decay a step of what the loss depends on: the last fifty steps or so decide."""
FASTEST = 0.5
"""Of its learning rate, that a gate is pushed in a step: AdamW's own step, up to the rate, can stand against that."""
WEAKEST = 1e-3
"""Ranks weaker than this part of the strongest of their bond are pushed as if they were so strong."""


class RankAdapter:
    """Trains the ranks of a compressed model beside its weights.

    ::

        add_rank_gates(model)
        optimizer = TTMuon(model, lr=1e-3)
        adapter = RankAdapter(model, optimizer, RankAdaptation(target_ratio=0.02), total_steps=10_000)
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            adapter.before_step(loss)
            optimizer.step()
            adapter.after_step()
            optimizer.zero_grad()
        adapter.finish()

    Gates are moved by the optimizer for the loss, and by a proximal step for the size. At every pruning the bonds are
    put into their canonical bases, where ranks are orthogonal and sorted, and gates are folded. Then dead ranks are
    pruned and, where a size is wanted, the least important ones (:func:`rank_importance`).

    Args:
        model: A compressed model with rank gates (:func:`hf_comera.training.add_rank_gates`), bare or in DDP.
        optimizer: That of its parameters, gates included; or Accelerate's wrapper around it.
        settings: Targets, stages and strengths.
        total_steps: Optimizer steps of the whole training.

    Raises:
        ValueError: If gates are missing in the model or the optimizer, or are decayed. Also if the stages do not fit
            into the training, or the wanted size cannot be reached; the smallest possible one is named.

    Source:
        CoMERA, arXiv:2405.14377 (gates, stages, size objective); pruning in canonical bases is ours.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: RankAdaptation, *, total_steps: int
    ) -> None:
        self.settings = check_adaptation(settings)
        self.stages = settings.stages(total_steps)
        self.ddp, self.model = find_ddp(model), bare_model(model)
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._given_optimizer = optimizer  # maybe Accelerate's wrapper
        check_gates(self.model, self.optimizer)
        drop_removed_when_loading(self.optimizer)
        self.table = BondTable.of(self.model)
        self.budget = core_budget(settings, self.model, core_parameters(self.table))
        self.start_size = core_parameters(self.table)
        self.dense_size = size_report(self.model).compressed_dense_parameters
        self.step = 0
        device = self.table.gates[0].device
        self.effects = torch.zeros(len(self.table.gates), dtype=torch.float64, device=device)
        """Decayed mean of what the loss depends on each bond."""
        self.strengths = torch.ones(self.table.num_gates, device=device)
        """Singular value of each rank at the last pruning, over the largest of its bond."""
        self.loss_sums = torch.zeros(2, dtype=torch.float64, device=device)
        """Decayed sum of losses, and of ones."""
        wanted_loss = torch.nan if settings.wanted_loss is None else settings.wanted_loss
        self.wanted_loss = torch.full((), wanted_loss, dtype=torch.float64, device=device)
        self.allowed_size = self.wanted_loss.new_zeros(())  # core parameters that the budget leaves after this step
        self._rate: float | Tensor = 0.0
        self._has_seen_loss = False
        self._losses: list[Tensor] = []  # of the accumulated batches of this step
        check_budget(settings, self.model, self.table, self.budget)
        self.history = RankHistory(ranks_before={name: list(m.ranks) for name, m in self.table.layers.items()})
        self.model.__dict__["_rank_history"] = self.history
        self.history.record(self.step, ungated_parameters(self.model))

    @torch.no_grad()
    def before_step(self, loss: Tensor) -> None:
        """Take note of the loss and of the gates' gradients, after the backward, and after unscaling and clipping.

        A ``GradScaler`` has to unscale first (``scaler.unscale_(optimizer)``); for that of Accelerate it is seen to.

        Args:
            loss: Mean loss of this step over all its accumulated batches, of this process; inside
                ``accelerator.accumulate``, where this is called for each batch, that of the batch.
        """
        if not isinstance(loss, Tensor):
            raise ValueError(f"loss={loss!r} is needed as a tensor: the mean loss of this step. Models need labels.")
        if self.step == 0:
            warn_of_small_model(self.model, self.table, self.budget)
        self._losses.append(loss.detach().to(self.loss_sums))
        if only_gathers(self._given_optimizer):
            return
        value, self._losses = torch.stack(self._losses).mean(), []
        self._has_seen_loss = True
        if not self.table.gates:
            return
        unscale(self._given_optimizer)
        if self.ddp is not None:
            dist.all_reduce(value, group=self.ddp.process_group)
            value = value / dist.get_world_size(self.ddp.process_group)
        newest = torch.stack([value, torch.ones_like(value)]) * (1 - LOSS_MEMORY)
        self.loss_sums.copy_(torch.where(value.isfinite(), self.loss_sums * LOSS_MEMORY + newest, self.loss_sums))
        gradients = [torch.zeros_like(gate) if gate.grad is None else gate.grad for gate in self.table.gates]
        self.effects.lerp_(bond_effects(self.table, self.table.flat(), self.table.flat(gradients)), 1 - EFFECT_MEMORY)
        self._rate = gate_rate(self.optimizer, self.table.gates[0])  # schedulers change it after the step

    @torch.no_grad()
    def after_step(self) -> None:
        """Push the gates, and prune ranks where it is time; call it after the optimizer's step."""
        if only_gathers(self._given_optimizer):
            return
        if not self._has_seen_loss:
            raise ValueError("after_step() without before_step(loss): call it after the backward, also of a NaN.")
        self._has_seen_loss = False
        self.prepare_step()
        if not was_skipped(self._given_optimizer):
            self.push()
        self.advance()

    @property
    def stage(self) -> str:
        """That of the present step: ``"early"``, ``"late"`` or ``"final"``."""
        return self.stages.name(self.step)

    def device_state(self) -> list[Tensor]:
        """The tensors that :meth:`before_step` and :meth:`push` read and write besides parameters and gradients."""
        return [self.effects, self.strengths, self.loss_sums, self.wanted_loss, self.allowed_size]

    def prepare_step(self) -> None:
        """The part of a step that only the host knows; before :meth:`push`."""
        if (budget := self._budget_after(self.step + 1)) is not None:
            self.allowed_size.fill_(budget)

    @torch.no_grad()
    def advance(self) -> None:
        """The part of :meth:`after_step` that follows the push: count the step, and prune ranks where it is time."""
        self.step += 1
        if self.step == 1:  # the optimizer has a state from now on
            check_moments(self.table.layers, self.optimizer)
        if self.settings.wanted_loss is None and self.step == max(self.stages.early, 1):
            self.wanted_loss.copy_(self.smoothed_loss)
        if self.stages.cuts_after(self.step) and self.table.gates:
            self._cut(self._budget_after(self.step))

    @torch.no_grad()
    def finish(self) -> None:
        """Meet the wanted size, whatever happened before, and fold the gates into the cores."""
        if self.budget is not None and core_parameters(self.table) > self.budget:
            logger.warning(
                "The wanted size was not reached in %d of %d steps; the rest is pruned now, without training after "
                "it.", self.step, self.stages.total,
            )  # fmt: skip
            self._cut(self.budget)
        fold_rank_gates(self.model, self.optimizer)
        self.table = BondTable.of(self.model)
        self.effects, self.strengths = self.effects[:0], self.strengths[:0]
        rewrap(self.ddp)
        self.history.record(self.step, ungated_parameters(self.model))

    @property
    def smoothed_loss(self) -> Tensor:
        """Mean of the last losses, a scalar on the device."""
        return self.loss_sums[0] / self.loss_sums[1]

    def logs(self) -> dict[str, float]:
        """Figures for the progress bar and trackers; reads from the device."""
        layers = (module for module in self.model.modules() if isinstance(module, TensorTrainModule))
        figures = {
            "rank_stage": {"early": 0.0, "late": 1.0, "final": 2.0}[self.stage],
            "live_ranks": float(sum(sum(module.ranks) for module in layers)),
            "parameters": float(ungated_parameters(self.model)),
            "smoothed_loss": float(self.smoothed_loss),
        }
        if self.table.gates:
            figures["relaxed_size"] = float(relaxed_size(self.table, self.table.flat())) / self.dense_size
        return figures

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly: plain numbers and lists, which JSON holds without loss."""
        return {
            "step": self.step,
            "total_steps": self.stages.total,
            "settings": vars(self.settings).copy(),
            "start_size": self.start_size,
            "effects": self.effects.tolist(),
            "strengths": self.strengths.tolist(),
            "loss_sums": self.loss_sums.tolist(),
            "wanted_loss": None if torch.isnan(self.wanted_loss) else self.wanted_loss.item(),
            "history": copy.deepcopy(vars(self.history)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; model and optimizer must be loaded first.

        Raises:
            ValueError: If the state is damaged, of a training of another length, or of a model of other ranks.
        """
        check_state(state, self.state_dict().keys(), self.settings, self.stages.total)
        drop_removed(self.optimizer)
        self.table = BondTable.of(self.model)
        check_ranks_of_state(state, self.table)
        self.step, self.start_size = state["step"], state["start_size"]
        self.effects = self.effects.new_tensor(state["effects"])
        self.strengths = self.strengths.new_tensor(state["strengths"])
        self.loss_sums = self.loss_sums.new_tensor(state["loss_sums"])
        if state["wanted_loss"] is not None:
            self.wanted_loss.fill_(state["wanted_loss"])
        self.history.__dict__.update(copy.deepcopy(state["history"]))
        rewrap(self.ddp)

    @torch.no_grad()
    def push(self) -> None:
        """The part of :meth:`after_step` that happens on the device alone, whatever the stage; graphs can hold it.

        The proximal step of the size objective on all gates, and of the squared norm on the cores.

        The step shrinks the singular values of the last pruning times the gates, over the largest of their bond. So
        weak ranks reach zero long before strong ones; none faster than the optimizer could hold it for the loss.
        """
        if self.stage == "final" or not self.table.gates:
            return
        gates, canonical = self.table.flat(), self.table.flat() * self.strengths
        strength: Tensor | float = self.settings.gamma
        if self.stage == "late":
            size, rho = exact_size(self.table, gates), self.settings.rho
            weight = late_weight(self.smoothed_loss, size, self.wanted_loss, self.allowed_size, rho)
            strength = self.settings.pressure * weight
        push = strength * relative_push(self.table, canonical) / self.strengths
        pushed = shrink(gates, self._rate * push.clamp_max(FASTEST))
        torch._foreach_copy_(self.table.gates, self.table.split(pushed))
        if self.settings.beta:
            cores = [core for module in self.table.layers.values() for core in module.cores()]
            torch._foreach_mul_(cores, 1 - self._rate * self.settings.beta)

    def _budget_after(self, steps: int) -> int | None:
        """The size allowed once ``steps`` steps are done."""
        if self.budget is None:
            return None
        return max(self.stages.budget(steps, self.start_size, self.budget), self.budget)

    def _cut(self, budget: int | None) -> None:
        """Go to the canonical bases; prune dead ranks and, above ``budget``, the least important others."""
        spectra = to_canonical_basis(self.table.layers, self.optimizer)
        agree_on_bases(self.ddp, self.table.layers, self.optimizer, spectra)
        relative = torch.cat([values / values[0].clamp_min(torch.finfo(values.dtype).tiny) for values in spectra])
        self.strengths.copy_(relative.clamp_min(WEAKEST))
        importance = rank_importance(self.table, self.effects, spectra, self.settings.threshold)
        chosen = choose_ranks(self.table, importance, self.settings.min_rank, budget, self.budget or 0)
        chosen = agreed(self.ddp, chosen)
        if [len(index) for index in chosen] == [gate.numel() for gate in self.table.gates]:
            return
        bonds = iter(chosen)
        kept = {name: [next(bonds) for _ in module.rank_gates()] for name, module in self.table.layers.items()}
        self.effects = self.effects[[place for place, index in enumerate(chosen) if len(index)]]
        parts = zip(self.table.split(self.strengths), chosen, strict=True)
        self.strengths = torch.cat([part[index.to(part.device)] for part, index in parts])
        cut_ranks(self.table.layers, kept, self.optimizer)
        self.table = BondTable.of(self.model)
        rewrap(self.ddp)
        self.history.record(self.step, ungated_parameters(self.model))


def check_state(state: dict[str, Any], keys: AbstractSet[str], settings: RankAdaptation, total_steps: int) -> None:
    """Refuse what is no state of rank adaptation, or one of a training of another length.

    Other settings are taken, for a target may have turned out too small; a warning names them.

    Args:
        state: To be loaded.
        keys: That a state has.
        settings: Those of the training that is to go on.
        total_steps: Of that training.

    Raises:
        ValueError: If the state cannot be gone on from.
    """
    if lacking := keys - state.keys() - {"settings"}:
        raise ValueError(
            f"The state of rank adaptation lacks {sorted(lacking)}: it is damaged or of something else. Load what "
            "RankAdapter.state_dict() returned."
        )
    if state["total_steps"] != total_steps:
        raise ValueError(
            f"total_steps={total_steps}, but the training to resume was one of {state['total_steps']}, and its stages "
            "were laid out for them. Resume with as many steps, or start from step 0 with its weights."
        )
    if "settings" not in state:
        logger.warning("The state of rank adaptation does not say its settings. Training goes on with %s.", settings)
    present, before = vars(settings), state.get("settings", {})
    if changed := [f"{name}={value!r}" for name, value in before.items() if present.get(name) != value]:
        logger.warning(
            "Rank adaptation goes on with other settings than it began with, which were %s.", ", ".join(changed)
        )


def check_ranks_of_state(state: dict[str, Any], table: BondTable) -> None:
    """Refuse a state of other ranks than those of the model.

    Raises:
        ValueError: If there are other bonds, or other ranks on them.
    """
    found = len(state["effects"]), len(state["strengths"])
    present = len(table.gates), table.num_gates
    if found != present:
        raise ValueError(
            f"The state of rank adaptation is of {found[0]} bonds with {found[1]} ranks in all, but the model has "
            f"{present[0]} with {present[1]}. Load the model of the same checkpoint first."
        )


def agree_on_bases(
    ddp: DistributedDataParallel | None,
    layers: Mapping[str, TensorTrainModule],
    optimizer: torch.optim.Optimizer,
    spectra: list[Tensor],
) -> None:
    """Cores and moments of the first process everywhere: signs and orders of singular vectors are arbitrary."""
    if ddp is None:
        return
    for module in layers.values():
        for core in module.cores():
            moments = [value for value in optimizer.state.get(core, {}).values() if isinstance(value, Tensor)]
            for tensor in (core.data, *(value for value in moments if value.device == core.device)):
                dist.broadcast(tensor, group_src=0, group=ddp.process_group)
    for values in spectra:
        dist.broadcast(values, group_src=0, group=ddp.process_group)


def agreed(ddp: DistributedDataParallel | None, chosen: list[Tensor]) -> list[Tensor]:
    """The choice of the first process, everywhere."""
    if ddp is not None:
        box = [chosen]
        dist.broadcast_object_list(box, group_src=0, group=ddp.process_group)
        chosen = box[0]
    return chosen


def only_gathers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it only gathers gradients at present (``accelerator.accumulate``)."""
    state = getattr(optimizer, "gradient_state", None)
    return state is not None and not state.sync_gradients


def unscale(optimizer: torch.optim.Optimizer) -> None:
    """Have its scaler of fp16 losses, if it has one, divide the gradients now, not only in the step."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        try:
            scaler.unscale_(optimizer.optimizer)  # type: ignore[attr-defined]
        except RuntimeError as error:
            if "already been called" not in str(error):  # it has, for clipping
                raise


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its scaler has left out the last step, whose gradients were not finite."""
    return bool(getattr(optimizer, "step_was_skipped", False))
