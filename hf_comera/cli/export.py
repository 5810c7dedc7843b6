"""``hf-comera export``: a model for other programs: ``export_onnx``, or a dense folder and how to go on from it."""

import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hf_comera.cli.layer_table import short_count
from hf_comera.cli.merge import merged_folder
from hf_comera.cli.options import AsJson, ClassName, Model, Overwrite, check_folder, print_json
from hf_comera.hub.checkpoint import atomic_save
from hf_comera.hub.export import OnnxExport, export_onnx
from hf_comera.hub.model import merge_and_unload
from hf_comera.hub.source import find_model

__all__ = ["export_command"]

ONNX_FILE = "model.onnx"


class Format(str, Enum):
    """What is written."""

    ONNX = "onnx"
    DENSE = "dense"


def export_command(
    folder: Model,
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    *,
    to: Annotated[
        Format, typer.Option("--format", help="onnx, or dense: a merged folder for vLLM, llama.cpp and others.")
    ] = Format.ONNX,
    merged: Annotated[
        bool, typer.Option("--merged", help="Of onnx: with dense weights, as large as the dense model.")
    ] = False,
    class_name: ClassName = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a model for programs that know nothing of hf_comera.

    ONNX (extra onnx) is made by torch.onnx.export, takes batches of any size, and is run in ONNX Runtime and compared
    with the model before it is kept. Its weights are the cores, unless --merged.

    Example: hf-comera export my-compressed-model my-onnx

    Example: hf-comera export my-compressed-model my-dense-model --format dense
    """
    if to is Format.DENSE:
        result = merged_folder(folder, out, class_name=class_name, overwrite=overwrite)
        result["go_on"] = _commands(out, result["class"])
        sizes = f"{short_count(result['parameters'])} parameters, {short_count(result['bytes'])}B"
        line = f"{out}: dense {result['class']}, {sizes}. Go on with:"
    else:
        result = _onnx_folder(folder, out, merged=merged, class_name=class_name, overwrite=overwrite)
        line = (
            f"{out / ONNX_FILE}: {short_count(result['bytes'])}B. In ONNX Runtime {result['output']} is that of the "
            f"model, up to {result['error']:.1g} of its largest entry. Go on with:"
        )
    if as_json:
        print_json(result)
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(line, markup=False)
    for command in result["go_on"]:
        console.print(f"  {command}", markup=False)


def _onnx_folder(folder: str, out: Path, *, merged: bool, class_name: str | None, overwrite: bool) -> dict[str, Any]:
    """Write file, config and tokenizer, and tell what was written."""
    source = find_model(folder, class_name)
    check_folder(out, overwrite, source)
    if merged and source.settings is None:
        raise ValueError(f"{folder} is dense already. Leave out --merged.")
    model = source.load(dtype=torch.float32)  # of ONNX Runtime on a CPU
    if merged:
        model = merge_and_unload(model)
    found: list[OnnxExport] = []

    def write(temporary: Path) -> None:
        with Console(stderr=True).status("Exporting, and running the file in ONNX Runtime"):
            found.append(export_onnx(model, temporary / ONNX_FILE))
        model.config.save_pretrained(temporary)
        source.copy_tokenizer(temporary)

    atomic_save(write, out, {})
    (result,) = found
    program = f"import onnxruntime; print(onnxruntime.InferenceSession({str(out / ONNX_FILE)!r}).get_inputs())"
    return {
        "folder": folder,
        "out": str(out),
        "class": type(model).__name__,
        "bytes": result.bytes,
        "inputs": list(result.inputs),
        "output": result.output,
        "error": result.error,
        "go_on": [f"python -c {shlex.quote(program)}"],
    }


def _commands(out: Path, class_name: str) -> list[str]:
    """What takes a dense folder on: programs for generation where the model generates."""
    folder = shlex.quote(str(out))
    if class_name.endswith(("ForCausalLM", "LMHeadModel")):
        return [
            f"vllm serve {folder}",
            f"python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {shlex.quote(f'{out}.gguf')}",
        ]
    program = f"import transformers; transformers.{class_name}.from_pretrained({str(out)!r})"
    return [f"python -c {shlex.quote(program)}"]
