"""Halves of many tensor trains by one CUDA launch: the chains of cores of a whole model, multiplied in float32."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_comera.ops.kernel_calls import current_stream, kernel_library, on_device
from hf_comera.ops.kernels import check_status

__all__ = ["Half", "HalvesPlan", "tt_halves"]

MAX_CORES = 8  # of kernels/tt_halves.cu
CORE_DTYPES = (torch.float32, torch.bfloat16)


class Half(NamedTuple):
    """One side of a tensor train.

    Shape:
        left: cores ``(1, n_1, r_1), ..., (r_{d-1}, n_d, R)``; right: ``(R, n_1, r_1), ..., (r_{d-1}, n_d, 1)``.
    """

    cores: list[Tensor]
    is_left: bool
    features: int
    """At most the product of the ``n``; what is beyond is cut off."""
    rank: int
    """At least ``R``; what is beyond is zeros."""


class HalvesPlan:
    """The launch for a fixed set of cores, which are read at every ``run``; results stay in the same memory.

    Building a plan copies a table of addresses to the device, so it cannot be captured in a CUDA graph; ``run`` can.

    Args:
        halves: At least one; all cores on one device and of one dtype, float32 or bfloat16, and contiguous.
        dtype: Of the results, float32 or bfloat16.

    Raises:
        ValueError: If the kernel cannot take the cores.
    """

    def __init__(self, halves: Sequence[Half], dtype: torch.dtype) -> None:
        _check(halves, dtype)
        self.halves, self.dtype = list(halves), dtype
        first = halves[0].cores[0]
        self.device, self.library = first.device, kernel_library(first.device)
        sizes = [half.rank * half.features for half in halves]
        parts = torch.empty(sum(sizes), dtype=dtype, device=self.device).split(sizes)
        self.results = [part.view(half.rank, half.features) for part, half in zip(parts, halves, strict=True)]
        rows = [self._row(half, result) for half, result in zip(halves, self.results, strict=True)]
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.scratch_size = max(_largest_product(half) for half in halves)
        blocks = len(halves) * self.library.hf_comera_tt_halves_splits()
        self.scratch = torch.empty(blocks * 2 * self.scratch_size, device=self.device)

    def run(self) -> list[Tensor]:
        """Multiply the cores as they are now.

        Shape:
            One ``(rank, features)`` for each half; neighbours in memory in their order.
        """
        cores_are_bf16 = self.halves[0].cores[0].dtype == torch.bfloat16
        with on_device(self.device):
            status = self.library.hf_comera_tt_halves(
                self.table.data_ptr(),
                len(self.halves),
                self.scratch.data_ptr(),
                self.scratch_size,
                cores_are_bf16,
                self.dtype == torch.bfloat16,
                current_stream(self.device),
            )
        check_status(self.library, status, "tt_halves")
        return self.results

    def _row(self, half: Half, result: Tensor) -> list[int]:
        row = [len(half.cores), int(half.is_left), half.features, half.rank, result.data_ptr()]
        for core in half.cores:
            row += [core.data_ptr(), *core.shape]
        return row + [0] * (self.library.hf_comera_tt_halves_row() - len(row))


def tt_halves(halves: Sequence[Half], dtype: torch.dtype) -> list[Tensor]:
    """Products of the cores of every half, ``(rank, features)`` each, in one launch."""
    return HalvesPlan(halves, dtype).run() if halves else []


def _largest_product(half: Half) -> int:
    """Numbers of the largest product on the way, with the core that the chain starts from, without the whole half."""
    cores = half.cores if half.is_left else half.cores[::-1]
    extent, sizes = 1, []
    for core in cores[: max(1, len(cores) - 1)]:
        extent *= core.shape[1]
        sizes.append(extent * core.shape[2 if half.is_left else 0])
    return max(sizes)


def _check(halves: Sequence[Half], dtype: torch.dtype) -> None:
    cores = [core for half in halves for core in half.cores]
    if dtype not in CORE_DTYPES or cores[0].dtype not in CORE_DTYPES:
        raise ValueError(f"tt_halves takes and makes float32 and bfloat16, not {cores[0].dtype} and {dtype}.")
    for core in cores:
        if core.dtype != cores[0].dtype or core.device != cores[0].device or not core.is_contiguous():
            raise ValueError(
                f"tt_halves takes contiguous cores of one dtype on one device; found {core.dtype} on {core.device} "
                f"with strides {core.stride()} beside {cores[0].dtype} on {cores[0].device}. Use core.contiguous()."
            )
    for half in halves:
        num_cores, true_rank = len(half.cores), half.cores[-1].shape[2] if half.is_left else half.cores[0].shape[0]
        covered = math.prod(core.shape[1] for core in half.cores)
        if not 1 <= num_cores <= MAX_CORES or not 1 <= true_rank <= half.rank or half.features > covered:
            raise ValueError(
                f"tt_halves takes 1 to {MAX_CORES} cores, ranks from 1 to rank and features that cores cover; "
                f"found {num_cores} cores that cover {covered}, features={half.features}, a rank of {true_rank}, "
                f"rank={half.rank}."
            )
