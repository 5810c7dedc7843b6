"""How bench_kernels.py times a call: in which format, and on a GPU as one of several in a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from interleaved_timing import Timings
from interleaved_timing import time_interleaved as time_in_turns

__all__ = ["FORMATS", "time_on", "use_format"]

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
CALLS_IN_A_GRAPH = 20


def use_format(name: str) -> torch.dtype:
    """Have products of float32 made in this format; returns the dtype of the operands."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
    return FORMATS[name]


def time_on(device: torch.device, candidates: dict[str, Callable[[], Tensor]], rounds: int) -> Timings:
    """Seconds of one call of each candidate."""
    if device.type == "cpu":
        return time_in_turns(candidates, rounds)
    timings = time_in_turns({name: replay(compute) for name, compute in candidates.items()}, rounds)
    return Timings({name: [each / CALLS_IN_A_GRAPH for each in times] for name, times in timings.seconds.items()})


def replay(compute: Callable[[], Tensor]) -> Callable[[], None]:
    """A function that runs several calls as one CUDA graph and waits for them."""
    compute()  # compiles and loads what it needs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_IN_A_GRAPH):
            compute()

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run
