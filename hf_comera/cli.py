"""The command line: what this machine has, compiling the CUDA kernels, and programs that load compressed models."""

import os
import platform
import subprocess
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_comera.hub.client import client_environment, find_client
from hf_comera.ops.cuda.build import (
    INSTALL_NVCC,
    KernelBuildError,
    cache_folder,
    compiler_version,
    find_gcc,
    find_nvcc,
    is_built,
)
from hf_comera.ops.cuda.library import (
    KernelResources,
    build_kernels,
    device_refusal,
    kernels_refusal,
    local_architectures,
)

__all__ = ["app"]

app = typer.Typer(
    name="hf-comera",
    help="Train Hugging Face models in tensor-train form. Start with [bold]doctor[/bold]: what this machine can do.",
    epilog="Training itself is Python: three lines in your own script, see the README.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


@app.command()
def doctor() -> None:
    """Show what hf_comera finds on this machine, and what to install for more.

    Everything works without a GPU and without nvcc; the kernels only make a GPU faster. Nothing is compiled here;
    where the kernels are built, an empty one is launched on each GPU.
    """
    table = Table("what", "found", title="hf_comera doctor")
    for row in (
        ("Python", platform.python_version()),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'not built in'})"),
        ("CUDA devices", _devices()),
        ("nvcc", _compiler(find_nvcc())),
        ("g++", _compiler(find_gcc())),
        ("cache", str(cache_folder())),
        ("kernels", _kernels()),
    ):
        table.add_row(row[0], escape(row[1]))
    console = Console(soft_wrap=True)
    console.print(table)
    for line in _advice():
        console.print(f"- {escape(line)}")


@app.command("build-kernels")
def build_kernels_command(
    architecture: Annotated[
        list[str] | None,
        typer.Option(
            "--architecture",
            "-a",
            metavar="NAME",
            help="Such as sm_80 (A100), sm_89 (L4, RTX 40) or sm_90a (H100, H200); repeat for several. Default: the "
            "GPUs of this machine.",
        ),
    ] = None,
) -> None:
    """Compile the CUDA kernels now and show what each one takes of the GPU.

    Without this the first use on a GPU compiles them, once, into the cache. With --architecture no GPU is needed, only
    nvcc: build on a login node, run on the others.

    The table has registers of a thread, bytes of them that spilled to slow memory (0 is right), and bytes of shared
    memory of a block.

    Example: hf-comera build-kernels --architecture sm_80 --architecture sm_90a
    """
    try:
        rows = build_kernels(architecture)
    except (KernelBuildError, ValueError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]No kernels:[/red] {escape(str(error))}")
        raise typer.Exit(1) from error
    console = Console(soft_wrap=True)
    console.print(_resource_table(rows))
    console.print(f"{len(rows)} kernels are in {escape(str(cache_folder()))}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    client: Annotated[str, typer.Argument(help="A program, such as lm_eval or trl, or a Python file.")],
) -> None:
    """Run a program with a command line of its own, in which compressed checkpoints load as any other.

    All that follows the program's name is given to it. No line of it has to import hf_comera, nor of the processes
    that it starts: they find a sitecustomize.py on PYTHONPATH, which imports hf_comera at the first compressed
    checkpoint, and nothing before.

    Example: hf-comera run lm_eval --model hf --model_args pretrained=my-compressed-model --tasks hellaswag
    """
    try:
        command = [*find_client(client), *context.args]
    except ValueError as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]Nothing to run:[/red] {escape(str(error))}")
        raise typer.Exit(2) from error
    environment = client_environment(dict(os.environ))
    if os.name == "nt":  # where replacing a process returns to the shell at once
        raise typer.Exit(subprocess.call(command, env=environment))
    sys.stdout.flush()
    os.execve(command[0], command, environment)


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


def _resource_table(rows: list[KernelResources]) -> Table:
    table = Table(title="Compiled kernels")
    table.add_column("kernel", no_wrap=True)
    table.add_column("GPU", no_wrap=True)
    for name in ("registers", "spilled", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        numbers = [str(row.num_registers), str(row.spilled_bytes), str(row.shared_bytes)]
        table.add_row(escape(row.kernel), row.architecture, *numbers)
    return table
