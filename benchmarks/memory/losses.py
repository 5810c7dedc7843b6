"""Part ``losses`` of the memory benchmark: whether FP8 states and activations train as well as those in fp32."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.memory.promises import LOSS_DIFFERENCE, beside_bar
from benchmarks.quality.tasks import Task, code_task
from benchmarks.quality.training import LAST_PART, MAX_GRADIENT_NORM, rate_course
from hf_comera import CoatAdamW, ComeraConfig, comera_param_groups, get_comera_model, set_activation_policy
from loop.measure import TENSOR_TRAIN

__all__ = ["measure_losses", "show_losses"]

Row = dict[str, str | int | float]
WIDTH = {"full": 256, "tiny": 32}
FULL, FP8 = "adamw", "coat_adamw"
TRAININGS: dict[str, tuple[str, Callable[..., Optimizer]]] = {
    FULL: ("keep", partial(torch.optim.AdamW, fused=True)),
    FP8: ("rank+fp8", CoatAdamW),
}
"""By the name of the optimizer: activation policy and class."""


def measure_losses(
    sizes: str, steps: int, seeds: Sequence[int], code_file: str | None, *, lr: float, device: str
) -> list[Row]:
    """A row for each seed and training."""
    task, rows = code_task(code_file), []
    for seed in seeds:
        for optimizer, (policy, _) in TRAININGS.items():
            losses = train(task, optimizer, seed, steps, width=WIDTH[sizes], lr=lr, device=torch.device(device))
            last = losses[-max(1, round(LAST_PART * steps)) :]
            rows.append(
                {
                    "model": f"roberta-2x{WIDTH[sizes]}",
                    "form": TENSOR_TRAIN,
                    "policy": policy,
                    "optimizer": optimizer,
                    "data": task.data,
                    "steps": steps,
                    "seed": seed,
                    "lr": lr,
                    "training_loss": round(statistics.fmean(last), 5),
                }
            )
    return rows


def train(
    task: Task, optimizer_name: str, seed: int, steps: int, *, width: int, lr: float, device: torch.device
) -> list[float]:
    """The loss of each step; weights, batches and rates are those of the seed, whatever the training."""
    torch.manual_seed(seed)
    model = _build(task, width).to(device)
    policy, optimizer_class = TRAININGS[optimizer_name]
    set_activation_policy(model, policy)
    optimizer = optimizer_class(comera_param_groups(model, lr), lr=lr)
    schedule = LambdaLR(optimizer, rate_course(steps))
    batches, losses = task.batches(seed), []
    for number in tqdm(range(steps), desc=f"{optimizer_name}, {policy}, seed {seed}", unit="step", leave=False):
        batch = {name: tensor.to(device) for name, tensor in batches[number].items()}
        loss = task.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _build(task: Task, width: int) -> PreTrainedModel:
    comera_config = ComeraConfig(target_modules=task.target_modules)
    return get_comera_model(task.model_class, comera_config, config=task.build_config(width)).train()


def show_losses(rows: Sequence[Mapping[str, str | int | float]], console: Console) -> None:
    """Print both losses of each seed, their means, and how far they are apart."""
    title = f"Loss of the last tenth of {rows[0]['steps']} steps, {rows[0]['model']} on {rows[0]['data']}"
    table = Table("seed", title=title, title_justify="left")
    for optimizer, (policy, _) in TRAININGS.items():
        table.add_column(f"{optimizer}, {policy}", justify="right")
    table.add_column("difference in %", justify="right")
    losses = {(row["seed"], row["optimizer"]): row["training_loss"] for row in rows}
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    for seed in seeds:
        table.add_row(str(seed), *_compared(losses[seed, FULL], losses[seed, FP8]))
    if len(seeds) > 1:
        means = [statistics.fmean(losses[seed, name] for seed in seeds) for name in (FULL, FP8)]
        table.add_section()
        table.add_row("mean", *_compared(*means))
    console.print(table)


def _compared(full: float, fp8: float) -> tuple[str, str, str]:
    difference = fp8 / full - 1
    shown = beside_bar(LOSS_DIFFERENCE, abs(difference), f"{100 * difference:+.2f}", unit=0.01)
    return f"{full:.4f}", f"{fp8:.4f}", shown
