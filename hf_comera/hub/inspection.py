"""``inspect_checkpoint``: what a compressed checkpoint holds and where it comes from, read without its weights."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from safetensors import safe_open

from hf_comera.compress import CompressionPlan, RankReport, plan
from hf_comera.hub.checkpoint import check_checkpoint
from hf_comera.hub.model import adopt_parts
from hf_comera.hub.source import find_model

__all__ = ["CheckpointReport", "inspect_checkpoint", "weight_files"]

CARD_FIELDS = ("base_model", "license", "language", "datasets")
"""What the metadata of a card says of where a model comes from."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """A compressed checkpoint whose files fit together."""

    folder: Path
    model_class: str
    plan: CompressionPlan
    """Layers with their true ranks, and, where weights were decomposed, the error of each."""
    bytes: int
    """Of the weight files."""
    dtypes: tuple[str, ...]
    """Of the stored tensors, as safetensors names them: I8 for weights in int8, U8 for those in int4."""
    provenance: dict[str, Any]
    """Versions, the id of the save, what was asked for, and what the model card says."""

    @property
    def has_rank_gates(self) -> bool:
        """Whether ranks were still being trained when the model was saved."""
        return any(layer.rank_gates for layer in self.plan.layers)

    def ranks(self) -> RankReport:
        """The ranks, to print or to draw. A checkpoint does not know those that training began with."""
        ranks = {layer.name: layer.ranks for layer in self.plan.layers}
        parameters, dense = self.plan.parameters, self.plan.dense_parameters
        return RankReport(before=ranks, after=ranks, parameters=parameters, dense_parameters=dense)


def inspect_checkpoint(folder: str | os.PathLike[str]) -> CheckpointReport:
    """Read what a compressed checkpoint says of itself, and check that its files belong together.

    Args:
        folder: Where ``save_pretrained`` wrote it.

    Raises:
        ValueError: If there is no such folder, the model is dense, or its files are damaged or of different saves.
    """
    source = find_model(os.fspath(folder))
    settings = source.settings
    if source.folder is None or source.folder.is_file() or settings is None:
        kind = "a name on the Hub" if source.folder is None else "a file" if source.folder.is_file() else "dense"
        raise ValueError(
            f"{os.fspath(folder)!r} is {kind}, and the folder of a compressed checkpoint is needed: one that "
            "model.save_pretrained(folder) of a compressed model wrote."
        )
    files = weight_files(source.folder)
    model = source.dense_skeleton()
    adopt_parts(model, settings)
    check_checkpoint([str(path) for path in files], settings)
    chosen = settings.to_dict()
    return CheckpointReport(
        folder=source.folder,
        model_class=type(model).__name__,
        plan=plan(model, settings),
        bytes=sum(path.stat().st_size for path in files),
        dtypes=_dtypes(files),
        provenance={
            "format_version": chosen["format_version"],
            "save_id": settings.save_id,
            "transformers_version": source.config.transformers_version,
            "rank": settings.rank,
            "target_modules": chosen["target_modules"],
            "storage": chosen.get("storage"),
            **_from_card(source.folder / "README.md"),
        },
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: all that its index names, or the one there is.

    Raises:
        ValueError: If there is none, or one is missing.
    """
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ValueError(
            f"{str(folder)!r} has no {missing[0]}. A compressed checkpoint has one: copy the whole folder again, or "
            "save the model again."
        )
    return [folder / name for name in sorted(names)]


def _dtypes(files: list[Path]) -> tuple[str, ...]:
    found = set()
    for path in files:
        with safe_open(path, framework="pt") as opened:
            slices = [opened.get_slice(key) for key in opened.keys()]
            found |= {part.get_dtype() for part in slices if 0 not in part.get_shape()}
    return tuple(sorted(found))


def _from_card(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    fields = ModelCard.load(path).data.to_dict()
    return {name: fields[name] for name in CARD_FIELDS if fields.get(name)}
