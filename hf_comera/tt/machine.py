"""How fast a machine multiplies matrices: ceilings per dtype, named presets, and a quick calibration of this CPU.

A product of ``(m, k)`` and ``(k, n)`` takes ``max(flops / rate(m, k, n), bytes / bandwidth)`` seconds, and each call
an overhead on top. Thin products run below the peak; by how much is a small table for each of the three sizes.
"""

import functools
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CPU_THREAD", "H200", "H200_TF32", "Ceilings", "Machine", "calibrated_cpu"]

Table = tuple[tuple[int, float], ...]
ALWAYS_PEAK: Table = ((1, 1.0),)


@dataclass(frozen=True, eq=False)
class Ceilings:
    """What limits a matrix product in one dtype. Tables give the share of ``flops`` reached at small sizes."""

    dtype: torch.dtype
    flops: float
    """Floating-point operations per second of a large product."""
    bandwidth: float
    """Bytes per second, operands and results together."""
    thin_rows: Table = ALWAYS_PEAK
    """``(m, share)`` in ascending order; linear in between, constant beyond the ends."""
    thin_inner: Table = ALWAYS_PEAK
    """``(k, share)``."""
    thin_columns: Table = ALWAYS_PEAK
    """``(n, share)``."""
    overhead: float = 0.0
    """Seconds of one product that has nothing to do, with the reshapes around it."""
    gradient_overhead: float = 0.0
    """The same for its two products in backward, with what autograd adds."""

    def rate(self, m: int, k: int, n: int) -> float:
        """Floating-point operations per second of a product of these sizes, if nothing else limits it."""
        share = min(_share(self.thin_rows, m), _share(self.thin_inner, k), _share(self.thin_columns, n))
        return self.flops * share

    def seconds(self, m: int, k: int, n: int) -> float:
        """Seconds of ``(m, k) @ (k, n)``, without the overhead of the call."""
        num_bytes = (m * k + k * n + m * n) * self.dtype.itemsize
        return max(2 * m * k * n / self.rate(m, k, n), num_bytes / self.bandwidth)


@dataclass(frozen=True, eq=False)
class Machine:
    """A device as the planner sees it. Two of them are equal only if they are the same object."""

    name: str
    source: str
    """Where the figures come from; says so if nothing was measured here."""
    ceilings: tuple[Ceilings, ...]
    """One entry a dtype."""
    fresh_bandwidth: float = float("inf")
    """Bytes per second at which new memory from the system can be touched: a page fault every few kilobytes."""
    fresh_bytes: int = 1 << 25
    """From here on a result is new memory every time; what is smaller, allocators keep. Default: glibc's limit."""

    def fresh_seconds(self, num_bytes: int) -> float:
        """What a result of this size costs besides, because its memory is new."""
        return num_bytes / self.fresh_bandwidth if num_bytes >= self.fresh_bytes else 0.0

    def of(self, dtype: torch.dtype) -> Ceilings:
        """The ceilings of ``dtype``; those of a wider dtype in the table, at its speed, where there are none.

        Raises:
            ValueError: If the table has nothing that is at least as wide.
        """
        for entry in self.ceilings:
            if entry.dtype == dtype:
                return entry
        wider = [entry for entry in self.ceilings if torch.promote_types(entry.dtype, dtype) == entry.dtype]
        if wider:
            return min(wider, key=lambda entry: entry.dtype.itemsize)
        known = ", ".join(str(entry.dtype) for entry in self.ceilings)
        raise ValueError(f"dtype={dtype}: machine {self.name!r} has ceilings for {known} only. Use one of these.")


# A thread of a recent server CPU: rounded figures, assumed; `calibrated_cpu` measures the one at hand.
_ASSUMED_THIN: Table = ((1, 0.15), (4, 0.3), (8, 0.45), (16, 0.7), (32, 0.9), (64, 1.0))
_ASSUMED_TABLES = (_ASSUMED_THIN,) * 3
CPU_THREAD = Machine(
    name="CPU thread",
    source="assumed, not measured here",
    ceilings=(
        Ceilings(torch.float64, 50e9, 20e9, *_ASSUMED_TABLES, overhead=3e-6, gradient_overhead=3e-5),
        Ceilings(torch.float32, 100e9, 20e9, *_ASSUMED_TABLES, overhead=3e-6, gradient_overhead=3e-5),
        Ceilings(torch.bfloat16, 200e9, 20e9, *_ASSUMED_TABLES, overhead=2e-5, gradient_overhead=6e-5),
    ),
    fresh_bandwidth=3e9,
)


def _h200(name: str, float32_flops: float) -> Machine:
    rates = {torch.float64: 50e12, torch.float32: float32_flops, torch.float16: 790e12, torch.bfloat16: 790e12}
    # overheads of launches that a CUDA graph, or a queue that never runs empty, hides from the host
    ceilings = (Ceilings(*rate, 4.3e12, overhead=2e-6, gradient_overhead=4e-6) for rate in rates.items())
    return Machine(name, "published or assumed, not measured here", tuple(ceilings))


H200 = _h200("H200", 50e12)
H200_TF32 = _h200("H200, float32 products in TF32", 395e12)

SMALL_SIZES = (1, 4, 8, 16, 32, 64, 128)
FULL_SIZE = 512
TINY_SIZE = 32  # libraries for short dtypes take over from here on, and their calls cost more
STREAMED_SIZE = 2048  # a matrix of this size does not fit into the caches of one core
FRESH_ENTRIES = 10 * 2**20  # 40 MiB, more than allocators keep
SECONDS_PER_SIZE, RUNS_PER_SIZE = 0.002, 8


def calibrated_cpu(dtype: torch.dtype = torch.float32) -> Machine:
    """This CPU with as many threads as torch uses now; measured once in a process, in some tenths of a second.

    Args:
        dtype: Which ceilings are needed; those of float32 come with it, since cores are contracted in at least that.
    """
    return _calibrate(dtype, torch.get_num_threads())


@functools.cache
def _calibrate(dtype: torch.dtype, num_threads: int) -> Machine:
    wanted = dict.fromkeys((dtype, torch.promote_types(dtype, torch.float32)))
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):  # whatever the caller is in the middle of
        return Machine(
            name=f"this CPU, {num_threads} thread{'s' if num_threads > 1 else ''}",
            source="measured in this process",
            ceilings=tuple(_measure_ceilings(each) for each in wanted),
            fresh_bandwidth=_fresh_bandwidth(),
        )


@torch.inference_mode()
def _measure_ceilings(dtype: torch.dtype) -> Ceilings:
    full, (call, overhead, gradient_overhead) = FULL_SIZE, _overheads(dtype)

    def rate(m: int, k: int, n: int) -> float:
        # ones, not random numbers: a calibration must leave the generators of the program alone
        left, right = torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
        seconds = _best_seconds(lambda: left @ right)
        return 2 * m * k * n / max(seconds - call, seconds / 2)

    flops = rate(full, full, full)

    def table(sizes: Callable[[int], tuple[int, int, int]]) -> Table:
        return (*((small, rate(*sizes(small)) / flops) for small in SMALL_SIZES), (full, 1.0))

    row, matrix = torch.ones(1, STREAMED_SIZE, dtype=dtype), torch.ones(STREAMED_SIZE, STREAMED_SIZE, dtype=dtype)
    return Ceilings(
        dtype=dtype,
        flops=flops,
        bandwidth=matrix.nbytes / _best_seconds(lambda: row @ matrix),
        thin_rows=table(lambda small: (small, full, full)),
        thin_inner=table(lambda small: (full, small, full)),
        thin_columns=table(lambda small: (full, full, small)),
        overhead=overhead,
        gradient_overhead=gradient_overhead,
    )


@torch.inference_mode(False)
@torch.enable_grad()
def _overheads(dtype: torch.dtype) -> tuple[float, float, float]:
    """Seconds of a tiny product, of one with reshapes around it, and what the backward of that adds."""
    tiny = torch.ones(TINY_SIZE, TINY_SIZE, dtype=dtype, requires_grad=True)
    constant, seed = tiny.detach(), torch.ones(TINY_SIZE**2, dtype=dtype)

    def forward(operand: Tensor) -> Tensor:
        return (operand.view(constant.shape) @ operand.view(constant.shape)).view(-1)

    alone = _best_seconds(lambda: forward(constant))
    both = _best_seconds(lambda: torch.autograd.grad(forward(tiny), tiny, seed))
    return _best_seconds(lambda: constant @ constant), alone, max(both - alone, 0.0)


def _fresh_bandwidth() -> float:
    """Of filling new memory, with the time taken out that filling memory takes anyway."""
    kept = torch.empty(FRESH_ENTRIES, dtype=torch.float32)
    again = _best_seconds(lambda: kept.fill_(1.0), runs=3)
    first = _best_seconds(lambda: torch.empty_like(kept).fill_(1.0), runs=3)
    return kept.nbytes / max(first - again, 1e-9)


def _best_seconds(compute: Callable[[], object], runs: int = RUNS_PER_SIZE) -> float:
    """The shortest of at least ``runs`` runs: what others on the machine cost is no property of it."""
    compute()
    best, start = float("inf"), time.perf_counter()
    begin, num_runs = start, 0
    while num_runs < runs or begin - start < SECONDS_PER_SIZE:
        compute()
        end = time.perf_counter()
        best, begin, num_runs = min(best, end - begin), end, num_runs + 1
    return best


def _share(table: Table, size: int) -> float:
    if size >= table[-1][0]:
        return table[-1][1]
    place = bisect_right(table, (size, float("inf")))
    if place == 0:
        return table[0][1]
    (low, low_share), (high, high_share) = table[place - 1], table[place]
    return low_share + (high_share - low_share) * (size - low) / (high - low)
