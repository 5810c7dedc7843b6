"""One training step of bench_step.py as a function without arguments: plain or as a CUDA graph, on a CPU or a GPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_comera import GraphedStep, TTMuon, comera_param_groups
from interleaved_timing import saved_for_backward

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
COMPILER = "inductor"


@dataclass
class Step:
    """Forward, backward, optimizer and zero_grad on one batch; a call returns when all of it is done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, Tensor]
    dtype: str
    optimizer_s: list[float] = field(default_factory=list)
    """Seconds of the optimizer, one for each plain step on a CPU; elsewhere it is not timed on its own."""
    compiled: Callable[..., Any] | None = None
    """The model as ``torch.compile`` made it, which runs in its place."""

    def __call__(self) -> None:
        """One plain step."""
        self.loss().backward()
        start = time.perf_counter()
        self.optimizer.step()
        if self.device.type == "cpu":
            self.optimizer_s.append(time.perf_counter() - start)
        self.optimizer.zero_grad()
        wait_for(self.device)

    def loss(self) -> Tensor:
        """The loss of the batch, under autocast for bf16."""
        with torch.autocast(self.device.type, DTYPES[self.dtype], enabled=self.dtype == "bf16"):
            return (self.model if self.compiled is None else self.compiled)(**self.batch).loss

    def as_graph(self) -> Callable[[], None]:
        """The same as one replay of a CUDA graph.

        Raises:
            RuntimeError: If the step cannot be recorded.
        """
        graphed = GraphedStep(self.model, self.optimizer, compute_loss=lambda _: self.loss())

        def step() -> None:
            graphed(self.batch)
            wait_for(self.device)

        for _ in range(graphed.num_warmup_steps + 1):
            step()
        if graphed.num_replays == 0:
            raise RuntimeError(f"no CUDA graph: {graphed.reason}. Leave --graphs out to time plain steps.")
        return step

    @property
    def device(self) -> torch.device:
        """Where the batch lies."""
        return self.batch["input_ids"].device


@dataclass(frozen=True)
class PreparedStep:
    """A step that is ready to be timed."""

    run: Callable[[], None]
    saved_bytes: int
    """Kept by autograd from forward to backward."""
    peak_bytes: int | None
    """The most GPU memory that the model, its optimizer and its steps take; None on a CPU."""
    plain: Step

    @property
    def optimizer_s(self) -> float | None:
        """Median seconds of the optimizer, where it was timed on its own."""
        return statistics.median(self.plain.optimizer_s) if self.plain.optimizer_s else None


def prepare_step(
    model: nn.Module, optimizer: str, batch: dict[str, Tensor], *, dtype: str, graphs: bool, compiled: bool = False
) -> PreparedStep:
    """Move the model to where the batch lies, and measure what it takes there.

    Args:
        model: On a CPU.
        optimizer: ``"tt_muon"`` or ``"adamw"``.
        batch: Arguments of the model.
        dtype: A key of ``DTYPES``.
        graphs: Whether the step is to be a CUDA graph.
        compiled: Whether ``torch.compile`` is to make the model's forward and backward; what autograd saves is counted
            without it, where tensors can be told apart.
    """
    device = batch["input_ids"].device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = model.to(device).train()
    step = Step(model, make_optimizer(model, optimizer), batch, dtype)
    saved_bytes = saved_for_backward(step.loss, model.parameters())
    if compiled:
        step.compiled = torch.compile(model, backend=COMPILER)
        step()  # compiles; a graph is recorded of what this left
    if device.type != "cuda":
        return PreparedStep(step, saved_bytes, None, step)
    torch.cuda.reset_peak_memory_stats(device)
    run = step.as_graph() if graphs else step  # a replay allocates nothing: the peak is that of the recording
    for _ in range(3):
        run()
    return PreparedStep(run, saved_bytes, torch.cuda.max_memory_allocated(device) - before, step)


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """TTMuon, or AdamW with the library's groups."""
    if name == "tt_muon":
        return TTMuon(model, 1e-4)
    return torch.optim.AdamW(comera_param_groups(model, 1e-4), lr=1e-4, fused=True)


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
