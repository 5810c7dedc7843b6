"""``RankAdapter``: rank adaptation beside any training loop, two calls a step."""

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_comera.compress.rank_report import RankHistory
from hf_comera.compress.size import size_report
from hf_comera.modules import TensorTrainModule
from hf_comera.training.basis import to_canonical_basis
from hf_comera.training.bond_table import BondTable
from hf_comera.training.importance import bond_effects, rank_importance
from hf_comera.training.pruning import cut_ranks, drop_removed
from hf_comera.training.rank_adaptation import RankAdaptation, core_budget
from hf_comera.training.rank_gates import bare_model, check_gates, fold_rank_gates, gate_rate, rewrap
from hf_comera.training.rank_objective import exact_size, late_weight, relative_push, relaxed_size, shrink
from hf_comera.training.trimming import choose_ranks, smallest_size, train_ranks

__all__ = ["RankAdapter"]

logger = logging.getLogger(__name__)

LOSS_MEMORY = 0.95
"""Decay a step of the smoothed loss."""
EFFECT_MEMORY = 0.98
"""Decay a step of what the loss depends on: the last fifty steps or so decide."""


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

    Gates are moved by the optimizer for the loss, and by a proximal step for the size. At every cut the bonds are put
    into their canonical bases, where ranks are orthogonal and sorted and gates are folded into them; then dead ranks
    are cut and, where a size is wanted, the least important ones (:func:`rank_importance`).

    Args:
        model: A compressed model with rank gates (:func:`hf_comera.training.add_rank_gates`), bare or in DDP.
        optimizer: That of its parameters, gates included; or Accelerate's wrapper around it.
        settings: Targets, stages and strengths.
        total_steps: Optimizer steps of the whole training.

    Raises:
        ValueError: If gates are missing in the model or the optimizer, are decayed, the stages do not fit into the
            training, or the wanted size cannot be reached; the smallest possible one is named.

    Source:
        CoMERA, arXiv:2405.14377 (gates, stages, size objective); cuts in canonical bases are ours.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: RankAdaptation, *, total_steps: int
    ) -> None:
        self.settings, self.stages = settings, settings.stages(total_steps)
        self.wrapped, self.model = model, bare_model(model)
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        check_gates(self.model, self.optimizer)
        self.optimizer.register_load_state_dict_pre_hook(lambda own, _: drop_removed(own))
        self.table = BondTable.of(self.model)
        self.budget = core_budget(settings, self.model, self._core_parameters())
        self.start_size = self._core_parameters()
        self.dense_size = size_report(self.model).compressed_dense_parameters
        self.step = 0
        device = self.table.gates[0].device
        self.effects = torch.zeros(len(self.table.gates), dtype=torch.float64, device=device)
        """Decayed mean of what the loss depends on each bond."""
        self.loss_sums = torch.zeros(2, dtype=torch.float64, device=device)
        """Decayed sum of losses, and of ones."""
        self.wanted_loss = torch.full((), settings.wanted_loss or torch.nan, dtype=torch.float64, device=device)
        self._check_budget()
        self.history = RankHistory(ranks_before={name: list(m.ranks) for name, m in self.table.layers.items()})
        self.model.__dict__["_rank_history"] = self.history
        self._record()

    @torch.no_grad()
    def before_step(self, loss: Tensor) -> None:
        """Take note of the loss and of the gates' gradients; call it after the backward (and clipping, if any).

        Args:
            loss: Mean loss of this step over all its accumulated batches, of this process.
        """
        if self.step == 0:
            self._warn_of_small_model()
        if not self.table.gates:
            return
        value = loss.detach().to(self.loss_sums)
        if isinstance(self.wrapped, DistributedDataParallel):
            dist.all_reduce(value, group=self.wrapped.process_group)
            value = value / dist.get_world_size(self.wrapped.process_group)
        self.loss_sums.mul_(LOSS_MEMORY).add_(torch.stack([value, torch.ones_like(value)]), alpha=1 - LOSS_MEMORY)
        gradients = [torch.zeros_like(gate) if gate.grad is None else gate.grad for gate in self.table.gates]
        self.effects.lerp_(bond_effects(self.table, self.table.flat(), self.table.flat(gradients)), 1 - EFFECT_MEMORY)
        self._rate = gate_rate(self.optimizer, self.table.gates[0])  # schedulers change it after the step

    @torch.no_grad()
    def after_step(self) -> None:
        """Push the gates, and cut ranks where it is time; call it after the optimizer's step."""
        stage = self.stages.name(self.step)
        self.step += 1
        if stage != "final" and self.table.gates:
            self._push(stage)
        if self.settings.wanted_loss is None and self.step == self.stages.early:
            self.wanted_loss.copy_(self.smoothed_loss)
        if self.stages.cuts_after(self.step) and self.table.gates:
            self._cut(self._budget_now())

    @torch.no_grad()
    def finish(self) -> None:
        """Meet the wanted size, whatever happened before, and fold the gates into the cores."""
        if self.budget is not None and self._core_parameters() > self.budget:
            logger.warning(
                "Training ended after %d of %d steps, before the wanted size was reached; the rest is cut off now, "
                "without training after it.", self.step, self.stages.total,
            )  # fmt: skip
            self._cut(self.budget)
        fold_rank_gates(self.model, self.optimizer)
        self.table = BondTable.of(self.model)
        rewrap(self.wrapped)
        self._record()

    @property
    def smoothed_loss(self) -> Tensor:
        """Mean of the last losses, a scalar on the device."""
        return self.loss_sums[0] / self.loss_sums[1]

    def logs(self) -> dict[str, float]:
        """Figures for the progress bar and trackers; reads from the device."""
        stage = {"early": 0.0, "late": 1.0, "final": 2.0}[self.stages.name(self.step)]
        trains = (module for module in self.model.modules() if isinstance(module, TensorTrainModule))
        figures = {
            "rank_stage": stage,
            "live_ranks": float(sum(sum(module.ranks) for module in trains)),
            "parameters": float(self._parameters()),
            "smoothed_loss": float(self.smoothed_loss),
        }
        if self.table.gates:
            figures["relaxed_size"] = float(relaxed_size(self.table, self.table.flat())) / self.dense_size
        return figures

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly: plain numbers and lists, which JSON holds without loss."""
        return {
            "step": self.step,
            "start_size": self.start_size,
            "effects": self.effects.tolist(),
            "loss_sums": self.loss_sums.tolist(),
            "wanted_loss": None if torch.isnan(self.wanted_loss) else self.wanted_loss.item(),
            "history": {**vars(self.history)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; model and optimizer must be loaded first."""
        drop_removed(self.optimizer)
        self.table = BondTable.of(self.model)
        if len(state["effects"]) != len(self.table.gates):
            raise ValueError(
                f"The state of rank adaptation is of {len(state['effects'])} bonds, but the model has "
                f"{len(self.table.gates)}. Load the model of the same checkpoint first."
            )
        self.step, self.start_size = state["step"], state["start_size"]
        self.effects = self.effects.new_tensor(state["effects"])
        self.loss_sums = self.loss_sums.new_tensor(state["loss_sums"])
        if state["wanted_loss"] is not None:
            self.wanted_loss.fill_(state["wanted_loss"])
        self.history.__dict__.update(state["history"])
        rewrap(self.wrapped)

    def _push(self, stage: str) -> None:
        """The proximal step of the size objective on all gates, and of the squared norm on the cores."""
        gates = self.table.flat()
        strength: Tensor | float = self.settings.gamma
        if stage == "late":
            weight = late_weight(
                self.smoothed_loss,
                exact_size(self.table, gates),
                self.wanted_loss,
                self._budget_now(),
                self.settings.rho,
            )
            strength = self.settings.pressure * weight
        pushed = shrink(gates, self._rate * strength * relative_push(self.table, gates))
        torch._foreach_copy_(self.table.gates, self.table.split(pushed))
        if self.settings.beta:
            cores = [core for module in self.table.layers.values() for core in module.cores()]
            torch._foreach_mul_(cores, 1 - self._rate * self.settings.beta)

    def _budget_now(self) -> int | None:
        """The size allowed after the steps done so far."""
        if self.budget is None:
            return None
        return max(self.stages.budget(self.step, self.start_size, self.budget), self.budget)

    def _cut(self, budget: int | None) -> None:
        """Go to the canonical bases; cut dead ranks and, above ``budget``, the least important others."""
        spectra = to_canonical_basis(self.table.layers, self.optimizer)
        importance = rank_importance(self.table, self.effects, spectra, self.settings.threshold)
        chosen = choose_ranks(self.table, importance, self.settings.min_rank, budget, self.budget or 0)
        chosen = self._agreed(chosen)
        if [len(index) for index in chosen] == [gate.numel() for gate in self.table.gates]:
            return
        bonds = iter(chosen)
        kept = {name: [next(bonds) for _ in module.rank_gates()] for name, module in self.table.layers.items()}
        self.effects = self.effects[[place for place, index in enumerate(chosen) if len(index)]]
        cut_ranks(self.table.layers, kept, self.optimizer)
        self.table = BondTable.of(self.model)
        rewrap(self.wrapped)
        self._record()

    def _agreed(self, chosen: list[Tensor]) -> list[Tensor]:
        """The choice of the first process, everywhere; the others have made the same up to rounding."""
        if isinstance(self.wrapped, DistributedDataParallel):
            box = [chosen]
            dist.broadcast_object_list(box, src=0, group=self.wrapped.process_group)
            return box[0]
        return chosen

    def _core_parameters(self) -> int:
        return sum(module.num_core_parameters for module in self.table.layers.values())

    def _parameters(self) -> int:
        report = size_report(self.model)
        return report.parameters - report.gate_parameters

    def _record(self) -> None:
        self.history.steps.append(self.step)
        self.history.parameters.append(self._parameters())

    def _check_budget(self) -> None:
        """Refuse a size that cannot be reached."""
        if self.budget is None:
            return
        zeros = torch.zeros(self.table.num_gates)
        smallest = smallest_size(train_ranks(self.table, zeros, self.settings.min_rank))
        if self.budget < smallest:
            others = self._parameters() - self._core_parameters()
            raise ValueError(self._impossible(self.budget + others, others, smallest))

    def _warn_of_small_model(self) -> None:
        if self.budget is not None and self.budget >= self._core_parameters():
            others = self._parameters() - self._core_parameters()
            logger.warning(
                "The model has %s parameters already, no more than the wanted %s: no rank will be cut for it.",
                f"{self._parameters():,}", f"{self.budget + others:,}",
            )  # fmt: skip

    def _impossible(self, wanted: int, others: int, smallest: int) -> str:
        """What is wrong with the wanted size, and which would be possible."""
        name = "target_ratio" if self.settings.target_ratio is not None else "target_parameters"
        ratio = (others + smallest) / size_report(self.model).dense_parameters
        return (
            f"{name}={getattr(self.settings, name)} asks for {wanted:,} parameters, but {others:,} are not in layers "
            f"whose ranks are trained, and with min_rank={self.settings.min_rank} the smallest possible size is "
            f"{others + smallest:,}. Use at least target_parameters={others + smallest} "
            f"(target_ratio={math.ceil(1e4 * ratio) / 1e4}), or compress more layers."
        )
