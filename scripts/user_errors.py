"""How a script ends when a setting, a file or a checkpoint cannot be used: with the message alone."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

STATUS = 2  # that of argparse


def run_script(main: Callable[[], int | None]) -> int:
    """``main()``; a ``ValueError`` that the project's own code raises becomes a message and the exit status 2.

    Those of other packages say nothing of settings and keep their traceback.
    """
    try:
        return main() or 0
    except ValueError as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        path = Path(place.filename).resolve()
        if path.parent != Path(__file__).resolve().parent and "hf_comera" not in path.parts:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all processes read the same settings
            script = Path(sys.argv[0]).name
            told = f"({path.name}, line {place.lineno}; python scripts/{script} --help explains every option)"
            print(f"{script}: error: {problem}\n  {told}", file=sys.stderr)
        return STATUS
