"""What the settings ask for: how a model computes, its optimizer, and the number of steps."""

import torch
from torch import nn

from hf_comera import CoatAdamW, TTMuon, comera_param_groups, set_activation_policy, set_fp8_linears
from hf_comera.ops import use_kernels
from loop.settings import LoopSettings


def choose_computation(model: nn.Module, training: LoopSettings) -> None:
    """Have ``model``, which is on its device, compute and keep activations as the settings say."""
    set_activation_policy(model, None if training.activation_policy == "keep" else training.activation_policy)
    use_kernels(training.kernels)
    if training.fp8:
        set_fp8_linears(model)


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


def padding_buckets(training: LoopSettings, longest: int) -> tuple[int, ...] | None:
    """The lengths that CUDA graphs pad sequences to: eight, of which ``longest`` is the last; None without graphs."""
    if not training.cuda_graphs:
        return None
    return tuple(-(-longest * part // 64) * 8 for part in range(1, 9))
