"""A run that is ready to train, from a model still to be built: seeds, optimizer, number of steps, schedule."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import get_scheduler

from hf_comera import CoatAdamW, TTMuon, add_rank_gates, comera_param_groups, set_activation_policy
from loop.batches import EpochBatches
from loop.checkpoint import run_identity
from loop.settings import LoopSettings, SettingGroups, make_adapter, rank_adaptation
from loop.train import Run


def assemble_run(
    accelerator: Accelerator,
    settings: SettingGroups,
    build: Callable[[], nn.Module],
    *,
    batches: EpochBatches,
    fingerprint: str,
    default_steps: int,
    betas: tuple[float, float] = (0.9, 0.999),
    **others: Any,
) -> Run:
    """Build model, optimizer, schedule and, if ranks are trained, what trains them; hand them to Accelerate.

    Args:
        accelerator: Where the run takes place.
        settings: All settings; those of the training become the run's.
        build: Makes the model, after the seed is set.
        batches: What is trained on.
        fingerprint: Of the data; only a run on the same data may resume this one.
        default_steps: Steps where neither steps nor epochs are asked for.
        betas: AdamW's.
        others: Further fields of the run.
    """
    training = settings.training
    set_seed(training.seed)
    model = build()
    set_activation_policy(model, None if training.activation_policy == "keep" else training.activation_policy)
    adaptation = rank_adaptation(training, model)
    if adaptation is not None:
        add_rank_gates(model)
    set_seed(training.seed, device_specific=True)  # from here on only dropout draws: differently in each process
    optimizer = make_optimizer(model, training, betas)
    total_steps = count_steps(training, batches.batches_per_epoch, default=default_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    # The schedule is not prepared: Accelerate would advance it once per process and step.
    scheduler = get_scheduler(training.lr_scheduler_type, optimizer, count_warmup(training, total_steps), total_steps)
    adapter = None
    if adaptation is not None:
        adapter = make_adapter(training, model, optimizer, adaptation, total_steps)
    facts = {"total_steps": total_steps, "data": fingerprint, "processes": accelerator.num_processes}
    return Run(
        accelerator=accelerator, model=model, optimizer=optimizer, scheduler=scheduler, batches=batches,
        settings=training, total_steps=total_steps, identity=run_identity(settings.as_dict(), facts),
        adapter=adapter, first_choice=0 if adapter is None else adapter.stages.early + adapter.stages.late, **others,
    )  # fmt: skip


def make_optimizer(
    model: nn.Module, training: LoopSettings, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """The optimizer the settings name; of a dense model ``tt_muon`` is AdamW."""
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "tt_muon":
        return TTMuon(model, rate, weight_decay=decay, betas=betas)
    groups = comera_param_groups(model, rate, weight_decay=decay)
    if training.optimizer == "coat_adamw":
        return CoatAdamW(groups, lr=rate, betas=betas)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)


def count_steps(training: LoopSettings, batches_per_epoch: int, *, default: int) -> int:
    """Steps of the whole run: as many as asked for, or as the epochs asked for have, or ``default``."""
    if training.max_train_steps is not None:
        return training.max_train_steps
    if training.num_train_epochs is not None:
        return max(1, round(training.num_train_epochs * batches_per_epoch / training.gradient_accumulation_steps))
    return default


def count_warmup(training: LoopSettings, total_steps: int) -> int:
    """Steps of the warm-up: as many as asked for, or a tenth of the run."""
    return total_steps // 10 if training.num_warmup_steps is None else training.num_warmup_steps
