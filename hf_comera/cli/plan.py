"""``hf-comera plan``: what would become what, the face of ``hf_comera.plan``."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from hf_comera.cli.layer_table import layer_table, plan_as_json, size_line
from hf_comera.cli.options import (
    AsJson,
    ClassName,
    EmbeddingWidth,
    Exclude,
    Model,
    NumFactors,
    Rank,
    RankPattern,
    Target,
    print_json,
    refuse_settings,
    settings_of,
)
from hf_comera.compress import ComeraConfig, CompressionPlan, plan
from hf_comera.hub.source import find_model

__all__ = ["plan_command"]


def plan_command(
    context: typer.Context,
    model: Model,
    *,
    rank: Rank = None,
    num_factors: NumFactors = None,
    embedding_width: EmbeddingWidth = None,
    target: Target = None,
    exclude: Exclude = None,
    rank_of: RankPattern = None,
    class_name: ClassName = None,
    every_layer: Annotated[bool, typer.Option("--every-layer", help="One row a layer, also of equal ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what becomes what, and the sizes. Only the config is read, no weights.

    Equal layers share a row; a * stands for their numbers. Factors of input and output and the ranks between the cores
    are those that training would begin with.

    Example: hf-comera plan FacebookAI/roberta-base --rank 30 --exclude word_embeddings

    Example: hf-comera plan my-model/config.json --target q_proj --target v_proj --rank-of v_proj=8
    """
    settings = settings_of(context)
    source = find_model(model, class_name)
    if (recorded := source.settings) is not None:
        refuse_settings(source, settings)
    skeleton = source.dense_skeleton()
    found = plan(skeleton, recorded or ComeraConfig(**settings))
    kind = type(skeleton).__name__
    if as_json:
        print_json({"model": model, "class": kind, **plan_as_json(found)})
        return
    console = Console(highlight=False)
    title = f"{kind}, compressed already" if recorded else f"Plan for {kind}"
    console.print(layer_table(found, title, every_layer=every_layer))
    for line in _notes(found):
        console.print(f"- {line}", markup=False)
    console.print(f"{size_line(found)}.", markup=False)


def _notes(found: CompressionPlan) -> Iterator[str]:
    for tied, embedding in found.ties.items():
        yield f"{tied} uses the cores of {embedding}"
    grown = [layer.name for layer in found if layer.parameters >= layer.dense_parameters]
    if grown:
        yield f"no smaller than dense: {', '.join(grown)}; lower the rank or --exclude them"
