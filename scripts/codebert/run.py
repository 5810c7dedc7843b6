"""A run of pre-training as it stands: what is trained by what, what happened so far, and its checkpoints."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from codebert.masking import HeldOut, TrainingBatches
from codebert.settings import TrainingSettings
from hf_comera import GraphedStep, RankAdapter
from loop.checkpoint import Stateful, load_checkpoint, read_history, save_checkpoint


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
    batches: TrainingBatches
    held_out: HeldOut
    settings: TrainingSettings
    total_steps: int
    identity: dict[str, Any]
    history: History = field(default_factory=History)
    adapter: RankAdapter | None = None
    """Trains the ranks; its state is part of the checkpoints."""
    graphed: GraphedStep | None = None
    """Does the steps, where they are to be CUDA graphs."""
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

    def measure(self) -> None:
        """Measure the held-out loss of the model as it is, and note it down."""
        self.read()
        self.history.held_out.append((self.step, self.held_out.loss(self.accelerator, self.model)))

    def figures(self) -> dict[str, float]:
        """The newest figures, for the progress bar and the trackers."""
        figures = {
            "held_out_loss": self.history.held_out[-1][1],
            "learning_rate": self.scheduler.get_last_lr()[0],
            "tokens_per_s": self.history.tokens_per_s,
            **(self.adapter.logs() if self.adapter else {}),
        }
        recent = self.history.losses[-self.settings.logging_steps :]
        return figures | ({"loss": sum(recent) / len(recent)} if recent else {})

    def save(self) -> Path:
        """Write a checkpoint of this very moment."""
        self.read()
        return save_checkpoint(
            self.accelerator, self.folder, self.step, identity=self.identity, history=asdict(self.history),
            stateful=self._stateful, keep=self.settings.save_total_limit,
        )  # fmt: skip

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: If another run wrote it.
        """
        history = read_history(checkpoint, self.identity)
        load_checkpoint(self.accelerator, checkpoint, self._stateful)
        self.history = History(**history)

    @property
    def _stateful(self) -> dict[str, Stateful]:
        return {"schedule": self.scheduler} | ({"ranks": self.adapter} if self.adapter else {})
