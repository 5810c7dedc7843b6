"""``hf-comera compress``: a dense checkpoint to a compressed one, by ``from_pretrained`` with a ``ComeraConfig``."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_comera.cli.layer_table import layer_table, plan_as_json, short_count, size_line
from hf_comera.cli.options import (
    AsJson,
    ClassName,
    EmbeddingWidth,
    Exclude,
    Model,
    NumFactors,
    Overwrite,
    Rank,
    RankPattern,
    Storage,
    Target,
    check_folder,
    print_json,
    settings_of,
)
from hf_comera.cli.refusals import note
from hf_comera.compress import ComeraConfig, CompressionPlan, size_report
from hf_comera.hub.source import find_model

__all__ = ["compress_command"]


def compress_command(
    context: typer.Context,
    dense: Model,
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    *,
    rank: Rank = None,
    num_factors: NumFactors = None,
    embedding_width: EmbeddingWidth = None,
    target: Target = None,
    exclude: Exclude = None,
    rank_of: RankPattern = None,
    storage: Storage = None,
    class_name: ClassName = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Decompose the weights of a dense checkpoint, and save the compressed one with its tokenizer.

    Weights are decomposed one at a time while they are read. The error of a layer is the part of its norm that the
    decomposition loses. Expect large ones: trained matrices are not of low rank, so train the result before using it.

    Example: hf-comera compress FacebookAI/roberta-base roberta-tt --rank 64 --exclude word_embeddings

    Example: hf-comera compress roberta roberta-tt --storage int8 --storage word_embeddings=int4
    """
    settings = settings_of(context)
    source = find_model(dense, class_name)
    check_folder(out, overwrite, source)
    if source.settings is not None:
        raise ValueError(f"{dense} is compressed already. See its layers: hf-comera inspect {dense}")
    # what it says of large errors is said below, of this model and in one line
    logging.getLogger("hf_comera.hub.model").setLevel(logging.ERROR)
    model: Any = source.load(quantization_config=ComeraConfig(**settings))
    source.save(model, out)
    found = model.comera_plan()
    if as_json:
        print_json({"model": dense, "out": str(out), "class": type(model).__name__, **plan_as_json(found)})
    else:
        console = Console(highlight=False)
        console.print(layer_table(found, f"{type(model).__name__}, decomposed"))
        stored = size_report(model).stored_bytes
        console.print(f"{out}: {size_line(found)}; {short_count(stored)}B of weights.", markup=False)
    note(_warning(found))


def _warning(found: CompressionPlan) -> str:
    worst = max(found.layers, key=lambda layer: layer.error or 0.0)
    return (
        f"a plain TT-SVD of a trained model needs training afterwards; up to {worst.error or 0.0:.0%} of the norm of "
        f"a layer is lost ({worst.name})."
    )
