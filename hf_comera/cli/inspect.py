"""``hf-comera inspect``: layers, ranks, sizes and origin of a compressed checkpoint: ``inspect_checkpoint``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_comera.cli.layer_table import layer_table, plan_as_json, short_count, size_line
from hf_comera.cli.options import AsJson, print_json
from hf_comera.hub.inspection import CheckpointReport, inspect_checkpoint

__all__ = ["inspect_command"]


def inspect_command(
    folder: Annotated[str, typer.Argument(help="Folder of a compressed checkpoint.", show_default=False)],
    *,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the ranks, layer by bond, such as ranks.png.")
    ] = None,
    every_layer: Annotated[bool, typer.Option("--every-layer", help="One row a layer, also of equal ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show layers, ranks, sizes and origin of a compressed checkpoint, and check that its files belong together.

    Weights stay on the disk. An error of a layer is what its decomposition lost when the model was compressed.

    Example: hf-comera inspect my-compressed-model --picture ranks.png
    """
    found = inspect_checkpoint(folder)
    if picture is not None:
        found.ranks().plot(picture)
    if as_json:
        print_json(_as_json(found, picture))
        return
    console = Console(highlight=False)
    console.print(layer_table(found.plan, f"{found.model_class} in {folder}", every_layer=every_layer))
    console.print(f"{size_line(found.plan)}; {short_count(found.bytes)}B of {', '.join(found.dtypes)}.", markup=False)
    if found.has_rank_gates:
        console.print("- its ranks were being trained: there are rank gates on the bonds", markup=False)
    for name, value in found.provenance.items():
        if value is not None:
            items = [f"{key}={one}" for key, one in value.items()] if isinstance(value, dict) else value
            shown = ", ".join(map(str, items)) if isinstance(items, list) else items
            console.print(f"- {name.replace('_', ' ')}: {shown}", markup=False)
    if picture is not None:
        console.print(f"- picture of the ranks: {picture}", markup=False)


def _as_json(found: CheckpointReport, picture: Path | None) -> dict[str, object]:
    return {
        "folder": str(found.folder),
        "class": found.model_class,
        "bytes": found.bytes,
        "dtypes": list(found.dtypes),
        "has_rank_gates": found.has_rank_gates,
        "provenance": found.provenance,
        "picture": picture and str(picture),
        **plan_as_json(found.plan),
    }
