"""How a command ends when it cannot do what it was asked: one panel on standard error, an exit code, no traceback."""

import errno
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from typer import Context, Exit
from typer.core import TyperGroup

from hf_comera.ops.cuda.build import KernelBuildError

__all__ = ["Commands", "note"]

BAD_INPUT, FAILED = 2, 1
"""Exit codes: another call may work; this machine, its disk or the network refused."""


class Commands(TyperGroup):
    """The group of all commands."""

    def invoke(self, ctx: Context) -> Any:  # type: ignore[override]
        """Run a command; what a setting, a file, a disk or a missing package refuses becomes a message."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError, KernelBuildError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # whoever read the output has seen enough
            told = Panel(escape(str(error)), title="Error", title_align="left", border_style="red")
            Console(stderr=True, highlight=False).print(told)
            raise Exit(BAD_INPUT if isinstance(error, ValueError) else FAILED) from error


def note(text: str) -> None:
    """Say something on standard error that is no result."""
    Console(stderr=True, highlight=False).print(f"[yellow]Note:[/yellow] {escape(text)}")
