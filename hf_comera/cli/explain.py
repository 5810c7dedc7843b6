"""``hf-comera explain``: what each kind of layer costs, what is off and why, the face of ``hf_comera.explain``."""

import dataclasses
from typing import Annotated

import typer
from rich.console import Console

from hf_comera.cli.options import (
    AsJson,
    Batch,
    ClassName,
    EmbeddingWidth,
    Exclude,
    Model,
    NumFactors,
    Rank,
    RankPattern,
    Target,
    batch_sizes,
    print_json,
    settings_of,
    skeleton_of,
)
from hf_comera.compress import explain
from hf_comera.hub.source import find_model

__all__ = ["explain_command"]


def explain_command(
    context: typer.Context,
    model: Model,
    *,
    batch: Batch = "8x128",
    rank: Rank = None,
    num_factors: NumFactors = None,
    embedding_width: EmbeddingWidth = None,
    target: Target = None,
    exclude: Exclude = None,
    rank_of: RankPattern = None,
    class_name: ClassName = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="A forward pass in place of a training step.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what each kind of compressed layer costs against dense, and what stands in the way of speed.

    Operations and bytes are counted from shapes, along the path that the layer takes on this machine; nothing is
    timed, and no weights are read.

    Example: hf-comera explain FacebookAI/roberta-base --batch 32x128

    Example, of one token generated: hf-comera explain my-compressed-model --batch 1x1 --inference
    """
    settings = settings_of(context)
    rows, tokens = batch_sizes(batch)
    skeleton = skeleton_of(find_model(model, class_name), settings)
    found = explain(skeleton, rows, tokens, training=not inference)
    if as_json:
        print_json({"model": model, "class": type(skeleton).__name__, **dataclasses.asdict(found)})
        return
    console = Console(highlight=False)
    console.print(found)
    for line in found.notes:
        console.print(f"- {line}", markup=False)
