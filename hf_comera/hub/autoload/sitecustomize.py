"""Python runs this when it starts with this folder on ``PYTHONPATH``, as in programs under ``hf-comera run``.

It imports nothing but the standard library. Where the program gets to Transformers' table of quantization methods,
``comera`` is entered there; hf_comera itself is imported when the first compressed checkpoint is met.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

TABLES = "transformers.quantizers.auto"


class _WaitForTables:
    """An import hook that waits for one module and enters ``comera`` there."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The method that Python calls on every import hook; all modules but one are left to the others."""
        if name != TABLES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_enter(module: ModuleType) -> None:
            execute(module)
            module.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault("comera", _Config)
            module.AUTO_QUANTIZER_MAPPING.setdefault("comera", _quantizer)

        spec.loader.exec_module = execute_and_enter  # type: ignore[method-assign]
        return spec


class _Config:
    """Stands for ``ComeraConfig`` until a checkpoint asks for it."""

    @classmethod
    def from_dict(cls, *args: object, **kwargs: object) -> object:
        """The config of a checkpoint."""
        return _registered("AUTO_QUANTIZATION_CONFIG_MAPPING").from_dict(*args, **kwargs)


def _quantizer(*args: object, **kwargs: object) -> object:
    """Stands for the quantizer until a checkpoint asks for it."""
    return _registered("AUTO_QUANTIZER_MAPPING")(*args, **kwargs)


def _registered(table: str) -> Any:
    """The class that hf_comera enters in place of its placeholder."""
    try:
        importlib.import_module("hf_comera")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"This checkpoint is compressed by hf_comera, which {sys.executable} does not find: run "
            f"`{sys.executable} -m pip install hf_comera`."
        ) from error
    return getattr(sys.modules[TABLES], table)["comera"]


def _run_next() -> None:
    """The ``sitecustomize`` that Python would have run without this one."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != here])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # not where tools import it to look for doctests
    sys.meta_path.insert(0, _WaitForTables())
    _run_next()
