"""What a rehearsal of the GPU report puts in the place of a GPU: emulated kernels, a tape for graphs, no compiler.

    python -m benchmarks.gpu.rehearsal --tool memcheck python program.py

As a program it stands for compute-sanitizer: it runs the rest of its words and finds nothing.
"""

import importlib
import subprocess
import sys
from typing import Any

__all__ = ["pretend_a_gpu"]


class Replacements:
    """Of pytest's ``monkeypatch`` what the tape needs; nothing is ever put back."""

    def setattr(self, target: Any, name: Any, value: Any = None) -> None:
        """``setattr(object, name, value)`` or ``setattr("module.name", value)``."""
        if isinstance(target, str):
            module, _, attribute = target.rpartition(".")
            target, name, value = importlib.import_module(module), attribute, name
        setattr(target, name, value)

    def setitem(self, target: Any, name: str, value: Any) -> None:
        """``target[name] = value``."""
        target[name] = value


def pretend_a_gpu() -> None:
    """Have this process do on the CPU what it would do on a GPU."""
    import torch

    from benchmarks.speed import step
    from hf_comera.ops.cuda.dispatch import serve_devices
    from tests.training.tape_capture import use_tape

    torch.set_num_threads(1)
    replacements = Replacements()
    use_tape(replacements)
    serve_devices("cpu")
    replacements.setattr("hf_comera.training.cuda_graphs.step.why_not_captured", lambda optimizer: None)
    replacements.setattr(step, "COMPILER", "eager")


def main(words: list[str]) -> int:
    """Run a program as compute-sanitizer would."""
    done = subprocess.run(words[2:])
    print("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors (rehearsed)")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
