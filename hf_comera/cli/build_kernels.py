"""``hf-comera build-kernels``: compile the CUDA kernels now, the face of ``ops.cuda.library.build_kernels``."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_comera.cli.options import AsJson, print_json
from hf_comera.ops.cuda.build import KernelBuildError, cache_folder
from hf_comera.ops.cuda.library import KernelResources, build_kernels

__all__ = ["build_kernels_command"]


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
    *,
    as_json: AsJson = False,
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
    except ValueError as error:  # of the machine as often as of the option
        raise KernelBuildError(str(error)) from error
    if as_json:
        print_json({"folder": str(cache_folder()), "kernels": [row._asdict() for row in rows]})
        return
    console = Console(soft_wrap=True)
    console.print(_resource_table(rows))
    console.print(f"{len(rows)} kernels are in {escape(str(cache_folder()))}")


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
