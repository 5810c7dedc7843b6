"""``hf-comera doctor``: what this machine has for hf_comera, and what to install for more."""

import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_comera.cli.options import AsJson, print_json
from hf_comera.ops.cuda.build import (
    INSTALL_NVCC,
    KernelBuildError,
    cache_folder,
    compiler_version,
    find_gcc,
    find_nvcc,
    is_built,
)
from hf_comera.ops.cuda.library import device_refusal, kernels_refusal, local_architectures

__all__ = ["doctor_command"]


def doctor_command(*, as_json: AsJson = False) -> None:
    """Show what hf_comera finds on this machine, and what to install for more.

    Everything works without a GPU and without nvcc; the kernels only make a GPU faster. Nothing is compiled here;
    where the kernels are built, an empty one is launched on each GPU.

    Example: hf-comera doctor
    """
    found = {
        "Python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'not built in'})",
        "CUDA devices": _devices(),
        "nvcc": _compiler(find_nvcc()),
        "g++": _compiler(find_gcc()),
        "cache": str(cache_folder()),
        "kernels": _kernels(),
    }
    if as_json:
        print_json({**found, "advice": _advice()})
        return
    table = Table("what", "found", title="hf_comera doctor")
    for what, value in found.items():
        table.add_row(what, escape(value))
    console = Console(soft_wrap=True)
    console.print(table)
    for line in _advice():
        console.print(f"- {escape(line)}")


def _devices() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = [
        f"{torch.cuda.get_device_name(index)} ({'.'.join(map(str, torch.cuda.get_device_capability(index)))})"
        for index in range(torch.cuda.device_count())
    ]
    return ", ".join(names)


def _compiler(program: str | None) -> str:
    """Path and version, which both compilers print on a line with a number and a dot."""
    if program is None:
        return "not found"
    try:
        lines = [line for line in compiler_version(program).splitlines() if any(part.isdigit() for part in line)]
    except KernelBuildError as error:
        return f"{program} does not run: {error}"
    releases = [line for line in lines if "release" in line] or lines
    return f"{program}: {releases[0].strip()}" if releases else program


def _kernels() -> str:
    architectures = local_architectures()
    if not architectures:
        return f"not used: {device_refusal()}"
    try:
        missing = [name for name in architectures if not is_built(name)]
    except KernelBuildError as error:
        return f"not built: {error}"
    if missing:
        return f"not built yet for {', '.join(missing)}; the first use will, in about a minute"
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    reasons = [kernels_refusal(device) for device in devices if device_refusal(device) is None]
    built = f"built for {', '.join(architectures)}"
    return next((f"{built}, but not used: {reason}" for reason in reasons if reason), built)


def _advice() -> list[str]:
    lines = []
    if find_nvcc() is None and torch.cuda.is_available():
        lines.append(f"For the CUDA kernels: {INSTALL_NVCC}")
    if find_nvcc() is not None and find_gcc() is None:
        lines.append("nvcc needs a C++ compiler: install g++, for example with `apt install g++`.")
    if not torch.cuda.is_available():
        lines.append("No GPU is used: models run through plain torch on the CPU. That is all they need.")
    return lines
