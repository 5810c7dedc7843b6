"""The training loop: steps, held-out losses, progress bar, checkpoints, and an orderly stop when interrupted."""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from held_out import HeldOut
from masked_language import TrainingBatches, masked_loss
from pretrain_settings import TrainingSettings
from run_checkpoint import save_checkpoint


@dataclass
class History:
    """What happened so far; part of every checkpoint, so that the picture at the end covers the whole run."""

    losses: list[float] = field(default_factory=list)
    """Training loss of each step."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out loss)."""
    num_tokens: int = 0
    seconds: float = 0.0
    """Time spent on steps alone."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over the whole run, padding, held-out measurements and checkpoints not counted."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass
class Run:
    """Everything the loop works on; model and optimizer are prepared by Accelerate."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    batches: TrainingBatches
    held_out: HeldOut
    settings: TrainingSettings
    total_steps: int
    identity: dict[str, Any]
    history: History = field(default_factory=History)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.history.losses)

    @property
    def folder(self) -> Path:
        """Where checkpoints go."""
        return Path(self.settings.output_dir)

    def save(self) -> Path:
        """Write a checkpoint of this very moment."""
        return save_checkpoint(
            self.accelerator, self.folder, self.step,
            identity=self.identity, history=asdict(self.history), keep=self.settings.save_total_limit,
        )  # fmt: skip


class Interrupt:
    """Remembers Ctrl-C or a termination signal, so that the step at hand can be finished first."""

    def __init__(self) -> None:
        self.signal_number = 0

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal_number:  # asked twice: do not wait
            raise KeyboardInterrupt
        self.signal_number = number

    def agreed(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked to stop; all processes get the same answer."""
        if accelerator.num_processes == 1:
            return bool(self.signal_number)
        flag = torch.tensor(int(bool(self.signal_number)), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum").item())


def train(run: Run) -> bool:
    """Train from where ``run`` stands to its last step.

    Returns:
        True when complete; False when it was interrupted, with a checkpoint of the last finished step on disk.
    """
    settings, accelerator = run.settings, run.accelerator
    bar = tqdm(
        total=run.total_steps, initial=run.step, disable=not accelerator.is_local_main_process, desc="training",
        dynamic_ncols=True, mininterval=1.0,
    )  # fmt: skip
    run.model.train()
    batches = _stream(run)
    with Interrupt() as interrupt, bar:
        if not run.step:
            run.history.held_out.append((0, run.held_out.loss(accelerator, run.model)))
        _show(bar, run)
        while run.step < run.total_steps:
            optimizer_step(run, batches)
            bar.update()
            last = run.step == run.total_steps
            if last or run.step % settings.eval_steps == 0:
                run.history.held_out.append((run.step, run.held_out.loss(accelerator, run.model)))
            if last or run.step % settings.logging_steps == 0 or run.step % settings.eval_steps == 0:
                _show(bar, run)
                accelerator.log(_figures(run), step=run.step)
            stop = interrupt.agreed(accelerator) and not last
            if stop or (settings.checkpointing_steps and run.step % settings.checkpointing_steps == 0):
                run.save()
            if stop:
                return False
    return True


def optimizer_step(run: Run, batches: Iterator[dict[str, Tensor]]) -> None:
    """One step over all its accumulated batches; its loss goes into the history."""
    start = time.perf_counter()
    accelerator, parts = run.accelerator, run.settings.gradient_accumulation_steps
    sums = torch.zeros(2, device=accelerator.device)  # loss, tokens
    for part in range(parts):
        batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in next(batches).items()}
        waiting = accelerator.no_sync(run.model) if part < parts - 1 else contextlib.nullcontext()
        with waiting:
            loss = masked_loss(run.model, batch) / parts
            accelerator.backward(loss)
        sums += torch.stack([loss.detach().float(), batch["attention_mask"].sum().float()])
    accelerator.clip_grad_norm_(run.model.parameters(), run.settings.max_grad_norm)
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    loss_sum, num_tokens = accelerator.reduce(sums, reduction="sum").tolist()
    run.history.losses.append(loss_sum / accelerator.num_processes)
    run.history.num_tokens += int(num_tokens)
    run.history.seconds += time.perf_counter() - start


def _stream(run: Run) -> Iterator[dict[str, Tensor]]:
    """The batches from the present step on. Which ones these are depends on nothing but their numbers."""
    parts = run.settings.gradient_accumulation_steps
    loader = torch.utils.data.DataLoader(
        run.batches,
        batch_size=None,
        sampler=range(run.step * parts, run.total_steps * parts),
        num_workers=run.settings.dataloader_num_workers,
        pin_memory=run.accelerator.device.type == "cuda",
        generator=torch.Generator(),  # a loader without its own draws from the generator that dropout uses
    )
    return iter(loader)


def _figures(run: Run) -> dict[str, float]:
    recent = run.history.losses[-run.settings.logging_steps :]
    return {
        "loss": sum(recent) / len(recent),
        "held_out_loss": run.history.held_out[-1][1],
        "learning_rate": run.scheduler.get_last_lr()[0],
        "tokens_per_s": run.history.tokens_per_s,
    }


def _show(bar: tqdm, run: Run) -> None:
    shown = {"held-out": f"{run.history.held_out[-1][1]:.3f}"} if run.history.held_out else {}
    if run.history.losses:
        figures = _figures(run)
        shown = {"loss": f"{figures['loss']:.3f}", **shown, "tokens/s": f"{figures['tokens_per_s']:,.0f}"}
    bar.set_postfix(shown, refresh=False)
