"""How far memory grows while something runs: the resident size on a CPU, the allocator's count on a GPU.

On a CPU measure in a process of its own (:func:`own_process.in_own_process`), and run what is measured once before:
otherwise memory that was freed earlier is used again and not seen.
"""

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from freed_memory import trim_memory
from hf_comera.modules.halves_cache import drop_cached_halves

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # of proc(5): the peak becomes what is resident now


class Growth(NamedTuple):
    """The most that was in use, less what was before."""

    num_bytes: int | None
    """None where the system does not say."""
    measured_by: str
    """``"VmHWM"``, ``"VmHWM of the process"``, ``"CUDA allocator"`` or nothing.

    The second stands for an upper bound, where the peak cannot be reset: it may be older than what was measured.
    """


def peak_growth(compute: Callable[[], object], device: torch.device) -> Growth:
    """Run ``compute`` once."""
    gc.collect()
    if device.type == "cuda":
        return _allocated(compute, device)
    if not STATUS.exists():
        compute()
        return Growth(None, "")
    return _resident(compute)


def largest_growth(compute: Callable[[], object], device: torch.device) -> Growth:
    """The larger of two runs; what the model keeps from step to step counts as made by each."""
    growths = []
    for _ in range(2):
        drop_cached_halves()
        growths.append(peak_growth(compute, device))
    return max(growths, key=lambda growth: growth.num_bytes or 0)


def _allocated(compute: Callable[[], object], device: torch.device) -> Growth:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    torch.cuda.synchronize(device)
    return Growth(torch.cuda.max_memory_allocated(device) - before, "CUDA allocator")


def _resident(compute: Callable[[], object]) -> Growth:
    trim_memory()
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        measured_by = "VmHWM"
    except OSError:
        measured_by = "VmHWM of the process"
    before = _status_bytes("VmRSS")
    compute()
    return Growth(max(0, _status_bytes("VmHWM") - before), measured_by)


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
