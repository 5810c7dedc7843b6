"""Start a program that knows nothing of hf_comera such that compressed models load in it, and in what it starts."""

import os
import shutil
import sys
from pathlib import Path

__all__ = ["client_environment", "find_client"]

AUTOLOAD = Path(__file__).parent / "autoload"
"""The folder whose ``sitecustomize.py`` every Python under ``hf-comera run`` runs first."""


def client_environment(environment: dict[str, str]) -> dict[str, str]:
    """``environment`` for a program in which compressed checkpoints load, and for the programs that it starts."""
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != AUTOLOAD]
    return {**environment, "PYTHONPATH": os.pathsep.join([str(AUTOLOAD), *others])}


def find_client(name: str) -> list[str]:
    """The command that starts ``name``: a program beside this Python, one on ``PATH``, or a Python file.

    Raises:
        ValueError: If there is none of them.
    """
    beside = str(Path(sys.executable).parent)
    program = shutil.which(name, path=beside) or shutil.which(name)
    if program is not None:
        return [program]
    if name.endswith(".py") and Path(name).is_file():
        return [sys.executable, name]
    raise ValueError(
        f"{name!r} is no program beside {sys.executable}, none on PATH, and no Python file. Give one with its "
        "arguments, for example: hf-comera run lm_eval --help, hf-comera run python -m lm_eval --help."
    )
