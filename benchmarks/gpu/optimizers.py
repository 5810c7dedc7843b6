"""Step "optimizers" of the GPU report: CoatAdamW by our kernel and in plain torch, and torch's fused AdamW."""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.gpu.worker import Cases, Row
from benchmarks.harness.timing import check_agreement
from benchmarks.speed.step import wait_for
from hf_comera import CoatAdamW
from hf_comera.ops import use_kernels
from loop.measure import time_interleaved

__all__ = ["run"]

TOLERANCE = 1e-3
"""Of parameters after three steps: codes of moments that lie between two FP8 numbers may be rounded either way."""


def run(cases: Cases) -> None:
    """One case."""
    cases.run("CoatAdamW", lambda: measure(cases))


def measure(cases: Cases) -> list[Row]:
    """Microseconds of a step on the same parameters and gradients."""
    sizes, device = cases.settings["sizes"], torch.device(cases.device)
    sets = {name: new_parameters(sizes, device) for name in ("dense", "torch", "kernel")}
    optimizers = {
        name: torch.optim.AdamW(ps, lr=1e-3, fused=True) if name == "dense" else CoatAdamW(ps, lr=1e-3)
        for name, ps in sets.items()
    }
    steps = {name: stepper(optimizer, name == "kernel", device) for name, optimizer in optimizers.items()}
    for _ in range(3):
        for step in steps.values():
            step()
    flat = {name: torch.cat([p.detach().reshape(-1) for p in ps]) for name, ps in sets.items()}
    check_agreement("CoatAdamW", flat["kernel"], flat["torch"], TOLERANCE)
    timings = time_interleaved(steps, cases.settings["rounds"])
    us = {f"{name}_us": round(timings.median(name) * 1e6, 1) for name in steps}
    ratios = {f"ratio_to_{name}": round(timings.ratio("kernel", name), 2) for name in ("dense", "torch")}
    return [{"op": "coat adamw", "parameters": flat["torch"].numel(), **us, **ratios}]


def new_parameters(sizes: list[tuple[int, int]], device: torch.device) -> list[nn.Parameter]:
    """With gradients; the same each time."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for size in sizes:
        values, gradients = (torch.randn(*size, generator=generator).to(device) for _ in range(2))
        parameter = nn.Parameter(values)
        parameter.grad = gradients
        parameters.append(parameter)
    return parameters


def stepper(optimizer: torch.optim.Optimizer, kernel: bool, device: torch.device) -> Callable[[], None]:
    """A function that does one step, by our kernel or without."""

    def step() -> None:
        use_kernels(kernel)
        try:
            optimizer.step()
            wait_for(device)
        finally:
            use_kernels(False)

    return step
