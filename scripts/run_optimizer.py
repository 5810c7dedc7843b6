"""The optimizer a run is trained with, and the number of its steps."""

import torch
from torch import nn

from hf_comera import TTMuon, comera_param_groups
from loop_settings import LoopSettings


def make_optimizer(
    model: nn.Module, training: LoopSettings, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """The optimizer the settings name; of a dense model both are AdamW."""
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "tt_muon":
        return TTMuon(model, rate, weight_decay=decay, betas=betas)
    return torch.optim.AdamW(comera_param_groups(model, rate, weight_decay=decay), lr=rate, betas=betas, fused=True)


def count_steps(training: LoopSettings, batches_per_epoch: int, *, default: int) -> int:
    """Steps of the whole run: as many as asked for, or as the epochs asked for have, or ``default``."""
    if training.max_train_steps is not None:
        return training.max_train_steps
    if training.num_train_epochs is not None:
        return max(1, round(training.num_train_epochs * batches_per_epoch / training.gradient_accumulation_steps))
    return default
