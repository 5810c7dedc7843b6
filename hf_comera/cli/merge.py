"""``hf-comera merge``: a compressed checkpoint to a dense one, the face of ``merge_and_unload``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_comera.cli.layer_table import short_count
from hf_comera.cli.options import AsJson, ClassName, Model, Overwrite, check_folder, print_json
from hf_comera.hub.model import merge_and_unload
from hf_comera.hub.source import find_model

__all__ = ["merge_command", "merged_folder"]


def merge_command(
    folder: Model,
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    *,
    class_name: ClassName = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Multiply the cores out: a dense checkpoint, with its tokenizer, that loads without hf_comera.

    It computes what the compressed one does, up to rounding, and is as large as the dense model.

    Example: hf-comera merge my-compressed-model my-dense-model
    """
    result = merged_folder(folder, out, class_name=class_name, overwrite=overwrite)
    if as_json:
        print_json(result)
        return
    sizes = f"{short_count(result['parameters'])} parameters, {short_count(result['bytes'])}B"
    Console(highlight=False).print(f"{out}: dense {result['class']}, {sizes}.", markup=False)


def merged_folder(folder: str, out: Path, *, class_name: str | None, overwrite: bool) -> dict[str, Any]:
    """Write the dense model, and tell what was written.

    Raises:
        ValueError: If ``folder`` is no compressed checkpoint, or ``out`` may not be written over.
    """
    source = find_model(folder, class_name)
    check_folder(out, overwrite, source)
    if source.settings is None:
        raise ValueError(f"{folder} is dense already: there is nothing to merge. Use it as it is.")
    model = merge_and_unload(source.load())
    source.save(model, out)
    return {
        "folder": folder,
        "out": str(out),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(path.stat().st_size for path in out.glob("model*.safetensors")),
    }
