"""The least time that a case of the kernels can take: its bytes or its arithmetic, over the ceilings of a device.

Source: the roofline model: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52, 2009.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_comera.modules import TTLinear, TTMEmbedding
from loop.measure import Timings
from loop.measure import time_interleaved as time_in_turns

__all__ = ["FORMATS", "WORK", "Ceilings", "Work", "measure_ceilings", "time_on", "use_format"]

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
CALLS_IN_A_GRAPH = 20
FLOAT, ID = 4, 8  # bytes; cores of linear layers and sums are in float32
MOST_ROUNDS = 11
Shape = tuple[int, ...]


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


class Work(NamedTuple):
    """What a case cannot do without."""

    num_bytes: int
    """Arguments read once, results written once."""
    flops: int
    in_float32: bool = False
    """Multiplied in plain float32 whatever the format, as chains of cores are."""


@dataclass(frozen=True)
class Ceilings:
    """The fastest that a device was seen to be."""

    bytes_per_s: float
    """Read and written together."""
    flops_per_s: dict[str, float]
    """By format."""

    def seconds(self, work: Work, name: str) -> float:
        """The larger of the times for the bytes and for the arithmetic, in a format."""
        rate = self.flops_per_s["fp32" if work.in_float32 else name]
        return max(work.num_bytes / self.bytes_per_s, work.flops / rate)


def measure_ceilings(device: torch.device, rounds: int, *, size: int) -> Ceilings:
    """Copy a square matrix, and multiply square ones in each format; ``size`` should be large."""
    rounds, flops_per_s = min(rounds, MOST_ROUNDS), {}
    for name in FORMATS:
        matrix = torch.randn(size, size, device=device, dtype=use_format(name))
        flops_per_s[name] = 2 * size**3 / _seconds(device, lambda operand=matrix: operand @ operand, rounds)
    use_format("fp32")  # whoever multiplies next does not expect tf32
    source = torch.ones(size, size, device=device)
    target = torch.empty_like(source)
    return Ceilings(2 * source.nbytes / _seconds(device, lambda: target.copy_(source), rounds), flops_per_s)


def _seconds(device: torch.device, compute: Callable[[], Tensor], rounds: int) -> float:
    return time_on(device, {"ceiling": compute}, rounds).median("ceiling")


def forward(shape: Shape, item: int) -> Work:
    """``x``, both factors and the bias come in, ``y`` and the code go out; ``item`` bytes a number."""
    tokens, num_in, num_out, rank = shape
    numbers = tokens * (num_in + num_out + rank) + rank * (num_in + num_out) + num_out
    return Work(numbers * item, 2 * tokens * rank * (num_in + num_out))


def backward(shape: Shape, item: int) -> Work:
    """Both gradients of each product of the forward pass."""
    tokens, num_in, num_out, rank = shape
    numbers = tokens * (2 * num_in + num_out + rank) + 2 * rank * (num_in + num_out) + num_out
    return Work(numbers * item, 4 * tokens * rank * (num_in + num_out))


def ffn_forward(shape: Shape, item: int) -> Work:
    """Four products; what is hidden stays on the chip, and its nonlinearity is not counted."""
    tokens, features, hidden, rank = shape
    numbers = 2 * tokens * features + 2 * rank * (features + hidden)
    return Work(numbers * item, 4 * tokens * rank * (features + hidden))


def ffn_backward(shape: Shape, item: int) -> Work:
    """Eight products, and the one that remakes what is hidden."""
    tokens, features, hidden, rank = shape
    numbers = tokens * (3 * features + 2 * rank) + 4 * rank * (features + hidden)
    return Work(numbers * item, 2 * tokens * rank * (4 * features + 5 * hidden))


def halves(shape: Shape, item: int, passes: int = 1) -> Work:
    """All cores come in, all halves go out; with gradients (3 passes) the other way too, for two products each."""
    num_layers, num_in, num_out, rank = shape
    layer = TTLinear(num_in, num_out, ranks=rank, device="meta")
    cores, middle = layer.cores(), len(layer.in_factors)
    flops = chain_flops(cores[:middle]) + chain_flops(cores[middle:][::-1])
    num_bytes = FLOAT * sum(core.numel() for core in cores) + item * layer.middle_rank * (num_in + num_out)
    return Work(min(passes, 2) * num_layers * num_bytes, passes * num_layers * flops, in_float32=True)


def lookup(shape: Shape, item: int, passes: int = 1) -> Work:
    """Ids and cores come in, rows go out; half tables are made on the way."""
    num_ids, vocabulary, hidden, rank = shape
    cores = TTMEmbedding(vocabulary, hidden, ranks=rank, device="meta").cores()
    left, right = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    flops = chain_flops(left) + chain_flops(right[::-1]) + 2 * num_ids * hidden * right[0].shape[0]
    num_bytes = item * (num_ids * hidden + sum(core.numel() for core in cores))
    return Work(ID * num_ids + min(passes, 2) * num_bytes, passes * flops, in_float32=True)


def chain_flops(cores: Sequence[Tensor]) -> int:
    """Of multiplying cores, the first of which is at an end of the train."""
    total, width = 0, 1
    for number, core in enumerate(cores):
        total += 2 * width * core.numel() if number else 0
        width *= core[0, ..., 0].numel()
    return total


WORK: dict[str, Callable[[Shape, int], Work]] = {
    "forward": forward,
    "backward": backward,
    "ffn forward": ffn_forward,
    "ffn backward": ffn_backward,
    "halves": halves,
    "halves and gradients": lambda shape, item: halves(shape, item, passes=3),
    "lookup": lookup,
    "lookup and gradients": lambda shape, item: lookup(shape, item, passes=3),
}
"""By what is timed: from its sizes and the bytes of a number."""
