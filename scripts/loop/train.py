"""The training loop: steps, held-out losses, progress bar, checkpoints, and an orderly stop when interrupted."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from hf_comera import RankAdapter
from loop.batches import EpochBatches
from loop.checkpoint import Stateful, load_checkpoint, read_history, restore_folder, save_checkpoint
from loop.memory import bytes_by_kind
from loop.settings import LoopSettings

Batch = dict[str, Tensor]


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
        """Whether any process was asked to stop; all processes get the same answer, for which several wait."""
        if accelerator.num_processes == 1:
            return bool(self.signal_number)
        flag = torch.tensor(int(bool(self.signal_number)), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum").item())


class HeldOutMeasure(Protocol):
    """What a run is measured on while it is trained."""

    def measure(self, accelerator: Accelerator, model: nn.Module) -> dict[str, float]:
        """Figures by name, ``held_out_loss`` among them; all processes get the same."""


@dataclass
class History:
    """What happened so far; part of every checkpoint, so that the picture at the end covers the whole run."""

    losses: list[float] = field(default_factory=list)
    """Training loss of each step."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out loss)."""
    figures: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """(step, value) of everything else that is measured on held-out data, by name."""
    num_tokens: int = 0
    seconds: float = 0.0
    """Time spent on steps alone."""
    step_seconds: list[float] = field(default_factory=list)
    """The same, step by step."""
    first_bytes: dict[str, int] = field(default_factory=dict)
    """Of weights, gradients and optimizer state after the first step."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over the whole run, padding, held-out measurements and checkpoints not counted."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True)
class Run:
    """Everything the loop works on; model and optimizer are prepared by Accelerate."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    batches: EpochBatches
    held_out: HeldOutMeasure
    settings: LoopSettings
    total_steps: int
    identity: dict[str, Any]
    history: History = field(default_factory=History)
    adapter: RankAdapter | None = None
    """Trains the ranks; its state is part of the checkpoints."""
    first_choice: int = 0
    """Steps before which no model is final: it may still be larger than wanted."""
    after_measuring: Callable[["Run"], None] = lambda run: None
    """Called whenever new held-out figures are in the history."""
    kept_folder: Path | None = None
    """A folder beside the checkpoints that belongs into each of them."""
    unread: list[Tensor] = field(default_factory=list)
    """Loss and tokens of the last steps, still on the device; :meth:`read` moves them into the history."""

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.history.losses) + len(self.unread)

    @property
    def folder(self) -> Path:
        """Where checkpoints go."""
        return Path(self.settings.output_dir)

    def read(self) -> None:
        """Wait for the device, and note down what the steps since the last time left there."""
        if not self.unread:
            return
        start = time.perf_counter()
        for loss_sum, num_tokens in torch.stack(self.unread).tolist():
            self.history.losses.append(loss_sum / self.accelerator.num_processes)
            self.history.num_tokens += int(num_tokens)
        waited = time.perf_counter() - start
        self.history.seconds += waited
        for place in range(-len(self.unread), 0):  # which of these steps it was is not known
            self.history.step_seconds[place] += waited / len(self.unread)
        self.unread.clear()

    def save(self) -> Path:
        """Write a checkpoint of this very moment."""
        self.read()
        return save_checkpoint(
            self.accelerator, self.folder, self.step,
            identity=self.identity, history=asdict(self.history), stateful=self._stateful,
            keep=self.settings.save_total_limit, kept_folder=self.kept_folder,
        )  # fmt: skip

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: If another run wrote it.
        """
        history = read_history(checkpoint, self.identity)
        load_checkpoint(self.accelerator, checkpoint, self._stateful)
        self.history = History(**history)
        if self.kept_folder is not None:
            restore_folder(self.accelerator, checkpoint, self.kept_folder)

    @property
    def _stateful(self) -> dict[str, Stateful]:
        return {"schedule": self.scheduler} | ({"ranks": self.adapter} if self.adapter else {})


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
            measure(run)
        _show(bar, run)
        while run.step < run.total_steps:
            optimizer_step(run, batches)
            bar.update()
            last = run.step == run.total_steps
            measured = last or run.step % settings.eval_steps == 0
            if last and run.adapter:
                run.adapter.finish()
            logged = measured or run.step % settings.logging_steps == 0
            if logged:
                run.read()
            if measured:
                measure(run)
            if logged:
                _show(bar, run)
                accelerator.log(_figures(run), step=run.step)
            stop = interrupt.agreed(accelerator) and not last
            due = settings.checkpointing_steps and run.step % settings.checkpointing_steps == 0
            if stop or (due and not (last and run.adapter)):  # without its gates a run could not go on
                run.save()
            if stop:
                return False
    return True


def measure(run: Run) -> None:
    """Measure the model as it is, and note the figures down."""
    for name, value in run.held_out.measure(run.accelerator, run.model).items():
        values = run.history.held_out if name == "held_out_loss" else run.history.figures.setdefault(name, [])
        values.append((run.step, value))
    run.after_measuring(run)


def optimizer_step(run: Run, batches: Iterator[Batch]) -> None:
    """One step over all its accumulated batches; its loss stays on the device, which nothing here waits for.

    Transformers does, for a mask of padding, and so does a cut of ranks.
    """
    start = time.perf_counter()
    accelerator, parts = run.accelerator, run.settings.gradient_accumulation_steps
    sums = torch.zeros(2, device=accelerator.device)  # loss, tokens
    for part in range(parts):
        batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in next(batches).items()}
        waiting = accelerator.no_sync(run.model) if part < parts - 1 else contextlib.nullcontext()
        with waiting:
            loss = run.model(**batch).loss / parts
            accelerator.backward(loss)
        sums += torch.stack([loss.detach().float(), batch["attention_mask"].sum().float()])
    sums = accelerator.reduce(sums, reduction="sum")
    accelerator.clip_grad_norm_(run.model.parameters(), run.settings.max_grad_norm)
    if run.adapter:
        run.adapter.before_step(sums[0] / accelerator.num_processes)
    run.optimizer.step()
    if run.adapter:
        run.adapter.after_step()
    run.scheduler.step()
    if not run.step:
        run.history.first_bytes = bytes_by_kind(run.model, [run.optimizer])._asdict()
    run.optimizer.zero_grad()
    run.unread.append(sums)
    run.history.step_seconds.append(time.perf_counter() - start)
    run.history.seconds += run.history.step_seconds[-1]


def _stream(run: Run) -> Iterator[Batch]:
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
        **{name: values[-1][1] for name, values in run.history.figures.items()},
        "learning_rate": run.scheduler.get_last_lr()[0],
        "tokens_per_s": run.history.tokens_per_s,
        **(run.adapter.logs() if run.adapter else {}),
    }


def _show(bar: tqdm, run: Run) -> None:
    shown = {"held-out": f"{run.history.held_out[-1][1]:.3f}"} if run.history.held_out else {}
    shown |= {name: f"{values[-1][1]:.4f}" for name, values in run.history.figures.items()}
    if run.history.losses:
        figures = _figures(run)
        shown = {"loss": f"{figures['loss']:.3f}", **shown, "tokens/s": f"{figures['tokens_per_s']:,.0f}"}
    if run.adapter:
        ranks = run.adapter.logs()
        shown |= {"stage": run.adapter.stage, "ranks": f"{ranks['live_ranks']:.0f}"}
        shown |= {"parameters": f"{ranks['parameters']:,.0f}", "size": f"{ranks.get('relaxed_size', 1.0):.3f}"}
    bar.set_postfix(shown, refresh=False)
