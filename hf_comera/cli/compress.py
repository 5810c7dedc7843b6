"""``hf-comera compress``: a dense checkpoint to a compressed one, by ``from_pretrained`` with a ``ComeraConfig``."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import PreTrainedModel

from hf_comera.cli.layer_table import layer_table, plan_as_json, short_count, size_line
from hf_comera.cli.options import (
    WHAT,
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
from hf_comera.compress import ComeraConfig, CompressionPlan, calibrate, size_report
from hf_comera.compress.budget import Budget, parse_budget, sized_config
from hf_comera.hub.build import get_comera_model
from hf_comera.hub.source import ModelSource, find_model

__all__ = ["compress_command"]

HEAL = "the dense model can now teach this one: scripts/compress_pretrained.py does both, HealingTrainer the second."
"""What to do after a calibrated decomposition."""


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
    calibrate_on: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="TEXTS",
            help="A file of some 1,000 texts like those to come, one a line: layers are decomposed for their outputs "
            "on them.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --calibrate, in place of ranks: 0.25 (part of the parameters), 5.7M (parameters) or 8MB (bytes "
            "as stored).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    class_name: ClassName = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Decompose the weights of a dense checkpoint, and save the compressed one with its tokenizer.

    Weights are decomposed one at a time while they are read. The error of a layer is the part of its norm that the
    decomposition loses. Expect large ones: trained matrices are not of low rank, so train the result before using it.
    With --calibrate the errors that count are those of the outputs, the model is held whole, and a size can be wanted.

    Example: hf-comera compress FacebookAI/roberta-base roberta-tt --rank 64 --exclude word_embeddings

    Example: hf-comera compress roberta roberta-tt --storage int8 --storage word_embeddings=int4

    Example: hf-comera compress roberta roberta-small --calibrate texts.txt --budget 40MB --storage int8
    """
    settings = settings_of(context)
    if budget is not None and calibrate_on is None:
        raise ValueError(
            f"--budget {budget} needs texts that tell which ranks matter, for example --calibrate texts.txt."
        )
    texts = None if calibrate_on is None else _read_texts(calibrate_on)
    wanted = None if budget is None else parse_budget(budget)
    source = find_model(dense, class_name)
    check_folder(out, overwrite, source)
    if source.settings is not None:
        raise ValueError(f"{dense} is compressed already. See its layers: hf-comera inspect {dense}")
    # what it says of large errors is said below, of this model and in one line
    logging.getLogger("hf_comera.hub.model").setLevel(logging.ERROR)
    model: Any
    if texts is None:
        model = source.load(quantization_config=ComeraConfig(**settings))
    else:
        model = _calibrated(source, ComeraConfig(**settings), texts, wanted)
    source.save(model, out)
    found = model.comera_plan()
    if as_json:
        print_json({"model": dense, "out": str(out), "class": type(model).__name__, **plan_as_json(found)})
    else:
        console = Console(highlight=False)
        console.print(layer_table(found, f"{type(model).__name__}, decomposed"))
        stored = size_report(model).stored_bytes
        console.print(f"{out}: {size_line(found)}; {short_count(stored)}B of weights.", markup=False)
    note(_warning(found) if texts is None else HEAL)


def _calibrated(source: ModelSource, config: ComeraConfig, texts: list[str], wanted: Budget | None) -> PreTrainedModel:
    """The model of ``source``, decomposed for the outputs of its layers on ``texts``."""
    tokenizer, dense = source.load_tokenizer(), source.load()
    calibration = calibrate(dense, texts, processing_class=tokenizer, sensitivities=wanted is not None)
    config = config if wanted is None else sized_config(dense, config, wanted, calibration)
    return get_comera_model(dense, config, calibration=calibration).eval()


def _read_texts(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"--calibrate {path} is not a file here ({Path.cwd()}).")
    try:
        texts = [text for line in path.read_text(encoding="utf-8").splitlines() if (text := line.strip())]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--calibrate {path} is no text in UTF-8 ({error}). Give a file of texts, one a line, such as texts.txt."
        ) from error
    if not texts:
        raise ValueError(f"--calibrate {path} holds no text. Give a file of some 1,000 texts, one a line.")
    return texts


def _warning(found: CompressionPlan) -> str:
    worst = max(found.layers, key=lambda layer: layer.error or 0.0)
    return (
        f"a plain TT-SVD of a trained model needs training afterwards; up to {worst.error or 0.0:.0%} of the norm of "
        f"a layer is lost ({worst.name})."
    )
