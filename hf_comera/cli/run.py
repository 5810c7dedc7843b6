"""``hf-comera run``: another program's command line, in which compressed checkpoints load as any other."""

import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from hf_comera.hub.client import client_environment, find_client

__all__ = ["SETTINGS", "run_command"]

SETTINGS: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""All that follows the program's name is its own."""


def run_command(
    context: typer.Context,
    client: Annotated[str, typer.Argument(help="A program, such as lm_eval or trl, or a Python file.")],
) -> None:
    """Run a program with a command line of its own, in which compressed checkpoints load as any other.

    All that follows the program's name is given to it. No line of it has to import hf_comera, nor of the processes
    that it starts: they find a sitecustomize.py on PYTHONPATH, which imports hf_comera at the first compressed
    checkpoint, and nothing before.

    Example: hf-comera run lm_eval --model hf --model_args pretrained=my-compressed-model --tasks hellaswag
    """
    command = [*find_client(client), *context.args]
    environment = client_environment(dict(os.environ))
    if os.name == "nt":  # where replacing a process returns to the shell at once
        raise typer.Exit(subprocess.call(command, env=environment))
    sys.stdout.flush()
    os.execve(command[0], command, environment)
