"""Options that several commands share, and what they become: settings, sizes of a batch, a folder to write to."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from hf_comera.compress import ComeraConfig
from hf_comera.compress.config import OTHERS
from hf_comera.hub.source import ModelSource

__all__ = [
    "WHAT",
    "AsJson",
    "Autocast",
    "Batch",
    "ClassName",
    "EmbeddingWidth",
    "Exclude",
    "Model",
    "NumFactors",
    "Overwrite",
    "Rank",
    "RankPattern",
    "Storage",
    "Target",
    "autocast_dtype",
    "batch_sizes",
    "check_folder",
    "print_json",
    "refuse_settings",
    "settings_of",
    "skeleton_of",
]

WHAT = "What to compress"

Model = Annotated[str, typer.Argument(help="A folder, a config.json, or a name on the Hub.", show_default=False)]
ClassName = Annotated[
    str | None,
    typer.Option("--class", metavar="NAME", help="Class of Transformers; default: the one that the config names."),
]
Rank = Annotated[
    int | None,
    typer.Option(metavar="N", help="Largest rank of every bond; default 30.", rich_help_panel=WHAT),
]
NumFactors = Annotated[
    int | None,
    typer.Option(metavar="N", help="Factors per side of a linear layer; default 3.", rich_help_panel=WHAT),
]
EmbeddingWidth = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="A narrow embedding table and a projection, in place of TTM cores.", rich_help_panel=WHAT
    ),
]
Target = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "-t",
        metavar="NAME",
        help="Last part of the names of layers to compress, such as query; repeat for several. Or one regular "
        "expression for whole names, or all-linear. Default: attention, FFN and word embedding.",
        rich_help_panel=WHAT,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", "-x", metavar="NAME", help="Layers to leave dense, named likewise.", rich_help_panel=WHAT
    ),
]
RankPattern = Annotated[
    list[str] | None,
    typer.Option(
        "--rank-of", metavar="NAME=N", help="Rank of particular layers, such as query=8.", rich_help_panel=WHAT
    ),
]
Storage = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND",
        help="Store weights as int8 or int4 rows, with scales; or NAME=KIND for particular layers, repeated.",
        rich_help_panel=WHAT,
    ),
]
Batch = Annotated[str, typer.Option("--batch", "-b", metavar="ROWSxTOKENS", help="Such as 8x512.")]
Autocast = Annotated[str | None, typer.Option(metavar="DTYPE", help="bf16 or fp16, where training will use autocast.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs, and nothing else.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write also where the folder is not empty.")]

REGULAR_EXPRESSION = re.compile(r"[*+?\\\[\](){}|^$]")
"""Characters that are in no name of a layer."""


def settings_of(context: typer.Context) -> dict[str, Any]:
    """The settings of a ``ComeraConfig`` that were given to a command; the others keep their defaults.

    Raises:
        ValueError: If a rank of particular layers is none.
    """
    options = context.params
    given = {
        "rank": options["rank"],
        "num_factors": options["num_factors"],
        "embedding_width": options["embedding_width"],
        "target_modules": _names(options["target"]),
        "exclude_modules": _names(options["exclude"]),
        "rank_pattern": dict(map(_rank_of, options["rank_of"])) if options["rank_of"] else None,
        "storage": _storage(options.get("storage")),  # of those that write a model
    }
    return {name: value for name, value in given.items() if value is not None}


def skeleton_of(source: ModelSource, settings: dict[str, Any]) -> PreTrainedModel:
    """The compressed model without weights: of a dense model with ``settings``, of a compressed one as it is.

    Raises:
        ValueError: If there are settings for a model that is compressed already.
    """
    if source.settings is None:
        return source.compressed_skeleton(ComeraConfig(**settings))
    refuse_settings(source, settings)
    return source.compressed_skeleton()


def refuse_settings(source: ModelSource, settings: dict[str, Any]) -> None:
    """What is compressed already has its layers and ranks.

    Raises:
        ValueError: If there are settings.
    """
    if settings:
        raise ValueError(
            f"{source.given} is compressed already, with the layers and ranks that its config.json records, so "
            f"{', '.join(settings)} cannot be chosen. Leave the options out, or give the dense model."
        )


def batch_sizes(text: str) -> tuple[int, int]:
    """Rows and tokens.

    Raises:
        ValueError: If ``text`` is not of the form ``8x512``.
    """
    found = re.fullmatch(r"([1-9]\d*)[x*,]([1-9]\d*)", text.strip())
    if found is None:
        raise ValueError(f"--batch {text} is no batch. Needed are rows and tokens, for example --batch 8x512.")
    return int(found[1]), int(found[2])


def autocast_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of autocast.

    Raises:
        ValueError: If ``name`` is none that autocast takes.
    """
    known = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
    if name is not None and name not in known:
        raise ValueError(f"--autocast {name} is no dtype of autocast. Use --autocast bf16, or fp16, or leave it out.")
    return None if name is None else known[name]


def check_folder(folder: Path, overwrite: bool, *sources: ModelSource) -> None:
    """Refuse to write over something.

    Raises:
        ValueError: If ``folder`` is a file, a source, or not empty without ``overwrite``.
    """
    if folder.is_file():
        raise ValueError(f"{str(folder)!r} is a file, and a folder is needed, for example {f'{folder}-model'!r}.")
    if any(source.folder is not None and folder.resolve() == source.folder.resolve() for source in sources):
        raise ValueError(
            f"{str(folder)!r} is the folder that is read. Give another one to write, for example {f'{folder}-new'!r}."
        )
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        names = sorted(path.name for path in folder.iterdir())
        found = f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
        raise ValueError(
            f"{str(folder)!r} is not empty ({found}). Give a new folder, or add --overwrite: files of the same names "
            "and old weights are replaced, all others stay."
        )


def print_json(result: dict[str, Any]) -> None:
    """One object on standard output."""
    print(json.dumps(result, indent=2, default=str))


def _names(given: list[str] | None) -> list[str] | str | None:
    """A list of last parts of names, or one string, which ``ComeraConfig`` takes for a pattern of whole names."""
    if given and len(given) == 1 and (given[0] == "all-linear" or REGULAR_EXPRESSION.search(given[0])):
        return given[0]
    return list(given) if given else None


def _storage(given: list[str] | None) -> str | dict[str, str] | None:
    """One kind, or a dictionary of patterns, in which a kind without a name is that of all others."""
    if not given:
        return None
    pairs = [text.rpartition("=") for text in given]
    kinds = {name if sign else OTHERS: kind for name, sign, kind in pairs}
    if len(kinds) < len(given) or not all(kinds):
        raise ValueError(
            f"--storage {' --storage '.join(given)} says two things of the same layers, or names none. Needed are "
            "different names: --storage int8 --storage word_embeddings=int4."
        )
    return kinds[OTHERS] if list(kinds) == [OTHERS] else kinds


def _rank_of(text: str) -> tuple[str, int]:
    name, _, rank = text.rpartition("=")
    if not name or not rank.isdecimal():
        raise ValueError(f"--rank-of {text} is no rank of a layer. Needed is a name and a number: --rank-of query=8.")
    return name, int(rank)
