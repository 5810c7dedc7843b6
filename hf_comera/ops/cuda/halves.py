"""Calls of the CUDA kernels of the halves of many tensor trains, and of their gradients: all sides in one call.

Nothing is kept between calls: addresses go with the launch, results come in fresh memory. So cores may move, and both
calls can be captured in a CUDA graph. CPU tensors go to the emulated kernels, which are for tests.
"""

import ctypes
import math
import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hf_comera.ops.cuda.dispatch import NoKernelError, check_taken, place_refusal
from hf_comera.ops.cuda.library import check_status, current_stream, kernel_library, on_device

__all__ = ["Half", "half_refusal", "tt_halves", "tt_halves_backward"]

DTYPES = (torch.float32, torch.bfloat16)
# of kernels/tt_chains.h
MAX_CORES = 8
SIDE_WORDS, CORE_WORDS = 7, 6
LARGEST = 2**31


class Half(NamedTuple):
    """One side of a tensor train.

    Shape:
        left: cores ``(1, n_1, r_1), ..., (r_{d-1}, n_d, R)``; right: ``(R, n_1, r_1), ..., (r_{d-1}, n_d, 1)``; gates
        ``(r_k,)`` on the last axis of the first cores, in float32.
    """

    cores: Sequence[Tensor]
    is_left: bool
    features: int
    """At most the product of the ``n``; features beyond are cut off."""
    rank: int
    """At least ``R``; rows beyond are zeros."""
    gates: Sequence[Tensor] = ()

    @property
    def num_tensors(self) -> int:
        """Cores and gates."""
        return len(self.cores) + len(self.gates)

    @property
    def true_rank(self) -> int:
        """``R``."""
        return self.cores[-1].shape[2] if self.is_left else self.cores[0].shape[0]

    @property
    def num_level_entries(self) -> int:
        """Entries of the products of the outermost 0, 1, ..., d-1 cores, each with its rank towards the middle."""
        chain = self.cores if self.is_left else self.cores[::-1]
        extents = accumulate((core.shape[1] for core in chain), operator.mul, initial=1)
        ranks = (core.shape[0 if self.is_left else 2] for core in chain)
        return sum(extent * rank for extent, rank in zip(extents, ranks, strict=False))


def half_refusal(half: Half, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot make this half in ``dtype``, or None where they can."""
    first, tensors = half.cores[0], [*half.cores, *half.gates]
    if dtype not in DTYPES or first.dtype not in DTYPES:
        return f"they take and make float32 and bfloat16, not {first.dtype} and {dtype}"
    expected = [first.dtype] * len(half.cores) + [torch.float32] * len(half.gates)
    if [tensor.dtype for tensor in tensors] != expected:
        return f"they take cores of one dtype and gates in float32, not {[str(tensor.dtype) for tensor in tensors]}"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "they take contiguous cores and gates; use core.contiguous()"
    covered = math.prod(core.shape[1] for core in half.cores)
    if not 1 <= len(half.cores) <= MAX_CORES or not 1 <= half.true_rank <= half.rank or half.features > covered:
        return (
            f"they take 1 to {MAX_CORES} cores, ranks from 1 to rank and features that cores cover, not "
            f"{len(half.cores)} cores that cover {covered}, features={half.features}, a rank of {half.true_rank} and "
            f"rank={half.rank}"
        )
    if half.rank * covered >= LARGEST or any(core.numel() >= LARGEST for core in half.cores):
        return f"they take halves and cores of fewer than {LARGEST} entries, not {half.rank} x {covered}"
    return place_refusal(*tensors)


def tt_halves(halves: Sequence[Half], dtype: torch.dtype) -> list[Tensor]:
    """Products of the cores of every half, as they are now, with their gates.

    Args:
        halves: Cores of all of them on one device and of one dtype.
        dtype: Of the results, float32 or bfloat16.

    Shape:
        One ``(rank, features)`` for each half.

    Raises:
        NoKernelError: If the kernel cannot take a half; ``half_refusal`` says so beforehand.
    """
    if not halves:
        return []
    _check(halves, dtype)
    device = halves[0].cores[0].device
    results = [torch.empty(half.rank, half.features, dtype=dtype, device=device) for half in halves]
    splits = kernel_library(device).hf_comera_tt_halves_splits()
    _launch("hf_comera_tt_halves", halves, results, [splits * half.num_level_entries for half in halves], [])
    return results


def tt_halves_backward(halves: Sequence[Half], grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients of the cores and gates of every half from that of its product; the same bits each time.

    Args:
        halves: As for :func:`tt_halves`.
        grads: Of the products, all of one dtype.

    Shape:
        One ``(rank, features)`` for each half -> for each half gradients of its cores, in their dtype, then of its
        gates, in float32.

    Raises:
        NoKernelError: As :func:`tt_halves`.
    """
    if not halves:
        return []
    _check(halves, grads[0].dtype)
    found = [[torch.empty_like(tensor) for tensor in (*half.cores, *half.gates)] for half in halves]
    splits = kernel_library(grads[0].device).hf_comera_tt_halves_splits()
    sizes = [(splits + 1) * half.num_level_entries + sum(core.numel() for core in half.cores) for half in halves]
    _launch("hf_comera_tt_halves_backward", halves, [grad.contiguous() for grad in grads], sizes, found)
    return found


def _launch(
    function: str,
    halves: Sequence[Half],
    products: Sequence[Tensor],
    scratch_sizes: Sequence[int],
    grads: Sequence[Sequence[Tensor]],
) -> None:
    """Call ``function`` with the table of all sides, in host memory, and with scratch memory for each."""
    first = halves[0].cores[0]
    scratch = torch.empty(sum(scratch_sizes), dtype=torch.float32, device=first.device)
    starts = accumulate(scratch_sizes, initial=0)
    words = SIDE_WORDS + CORE_WORDS * max(len(half.cores) for half in halves)
    table: list[int] = []
    for index, (half, product, start) in enumerate(zip(halves, products, starts, strict=False)):
        row = [len(half.cores), int(half.is_left), half.features, half.rank, half.cores[0].shape[0]]
        row += [product.data_ptr(), scratch.data_ptr() + start * scratch.element_size()]
        row += _core_words(half, grads[index] if grads else ())
        table += row + [0] * (words - len(row))
    library = kernel_library(first.device)
    formats = (first.dtype == torch.bfloat16, products[0].dtype == torch.bfloat16)
    with on_device(first.device):
        status = getattr(library, function)(
            (ctypes.c_int64 * len(table))(*table), len(halves), words, *formats, current_stream(first.device)
        )
    check_status(library, status, function)


def _core_words(half: Half, grads: Sequence[Tensor]) -> Iterator[int]:
    """The words of the table for each core."""
    num_cores = len(half.cores)
    for place, core in enumerate(half.cores):
        has_gate = place < len(half.gates)
        yield from (core.data_ptr(), half.gates[place].data_ptr() if has_gate else 0, core.shape[1], core.shape[2])
        yield grads[place].data_ptr() if grads else 0
        yield grads[num_cores + place].data_ptr() if grads and has_gate else 0


def _check(halves: Sequence[Half], dtype: torch.dtype) -> None:
    first = halves[0].cores[0]
    for half in halves:
        core = half.cores[0]
        if core.dtype != first.dtype or core.device != first.device:
            raise NoKernelError(
                f"tt_halves takes cores of one dtype on one device; found {core.dtype} on {core.device} beside "
                f"{first.dtype} on {first.device}. Call it once for each."
            )
        check_taken("tt_halves", half_refusal(half, dtype))
