"""Step "environment" of the GPU report: compilers, driver, the build of the kernels, and a first launch."""

import shutil
import subprocess
from functools import partial

import torch

from benchmarks.gpu.worker import Cases, Row, SkippedError
from benchmarks.harness.timing import check_agreement
from hf_comera.ops.cuda.build import find_gcc, find_nvcc
from hf_comera.ops.cuda.library import build_kernels, device_refusal, emulated_kernels, kernels_refusal
from hf_comera.ops.cuda.low_rank_linear import low_rank_linear

__all__ = ["run"]

TOOLS = {
    "driver": ["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader"],
    "compute-sanitizer": ["compute-sanitizer", "--version"],
    "nvcc": [find_nvcc() or "nvcc", "--version"],
    "g++": [find_gcc() or "g++", "--version"],
}


def run(cases: Cases) -> None:
    """All cases of the step."""
    for name, words in TOOLS.items():
        cases.run(name, partial(version_of, words))
    cases.run("build", partial(build, cases.rehearsal))
    cases.run("first launch", partial(first_launch, torch.device(cases.device), cases.rehearsal))


def version_of(words: list[str]) -> list[Row]:
    """What a program says of itself."""
    if shutil.which(words[0]) is None:
        raise SkippedError(f"{words[0]} was not found")
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if any(map(str.isdigit, line))]
    return [{"what": words[0], "found": (lines or ["nothing with a number in it"])[0]}]


def build(rehearsal: bool) -> list[Row]:
    """Compile the kernels; what each one takes of a multiprocessor."""
    if rehearsal:
        emulated_kernels()
        return [{"what": "kernels", "found": "emulated"}]
    if reason := device_refusal():
        raise SkippedError(reason)
    rows = build_kernels()
    spilling = [row.kernel for row in rows if row.spilled_bytes]
    most = max(row.num_registers for row in rows)
    found = f"{len(rows)} kernels, at most {most} registers, spills: {', '.join(spilling) or 'none'}"
    return [{"what": "kernels", "found": found}]


def first_launch(device: torch.device, rehearsal: bool) -> list[Row]:
    """One small product: a library that compiles and loads may still not run with the driver that is there."""
    if not rehearsal and (reason := kernels_refusal(device)):
        raise RuntimeError(reason)
    x, left, right = (torch.randn(shape, device=device) for shape in ((40, 64), (16, 64), (16, 96)))
    y, _ = low_rank_linear(x, left, right)
    check_agreement("the first launch", y, x @ left.T @ right, 1e-5)
    return [{"what": "first launch", "found": "agrees with plain torch"}]
