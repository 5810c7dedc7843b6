"""What the files of a compressed checkpoint hold, and whether they belong together: read from headers alone.

Everything here is found out before a module is replaced or a weight is read, so a file that is refused leaves nothing
behind.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.record import record_digest
from hf_comera.hub.saving import RECORDS, SAVE_ID, UNFINISHED

__all__ = ["StoredLayer", "check_checkpoint", "is_dense_checkpoint", "read_layers"]

FLOATING_POINT = ("F64", "F32", "F16", "BF16")
"""The dtypes of safetensors in which cores and gates are taken."""

PARAMETER = re.compile(r"(.+)\.(core|rank_gate)_(\d+)")


@dataclass
class StoredLayer:
    """One layer of a checkpoint as its file has it: the numbers of its cores and of its gates."""

    file: str
    cores: list[int] = field(default_factory=list)
    gates: list[int] = field(default_factory=list)

    @property
    def form(self) -> tuple[int, bool]:
        """How many cores there are, and whether there are gates: equal under any name."""
        return len(self.cores), bool(self.gates)


def check_checkpoint(files: Sequence[str], config: ComeraConfig) -> None:
    """Refuse files that are damaged, do not belong together, or lack what ``config`` says of them.

    Args:
        files: Paths of the weight files.
        config: The settings of the model that is about to be built. It may be a part of a larger one, in whose files
            there are more layers than the record of the part has.

    Raises:
        ValueError: With the file, the layer, what was found and what to do.
    """
    if not config.layers:
        raise ValueError(
            f"{files[0]}: config.json says quant_method='comera', but its quantization_config.layers names no "
            "compressed layer. Restore the config.json that was saved with these weights."
        )
    _check_saves(files, config)
    recorded, stored = _with_cores(config.layers), read_layers(files)
    if recorded and not stored:
        raise ValueError(
            f"{files[0]} holds no tensor-train cores, though config.json says quant_method='comera'. Restore the "
            "matching file, or remove quantization_config from config.json."
        )
    for name, layer in stored.items():
        _check_numbers(name, layer)
    if not Counter(recorded.values()) - Counter(layer.form for layer in stored.values()):
        return
    # names in the file may be older than those in the record: where they are, a layer can be named of one side only
    suspects = [name for name, form in recorded.items() if name in stored and stored[name].form != form]
    name = next(iter(suspects or [name for name in recorded if name not in stored] or recorded))
    raise ValueError(_disagreement(name, recorded[name], stored.get(name), files, len(recorded), len(stored)))


def _with_cores(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, bool]]:
    """The form of each recorded layer that has cores: of a factorized embedding its narrow table may be a train."""
    cored = {name: entry for name, entry in layers.items() if "width" not in entry or entry["ranks"]}
    return {
        f"{name}.table" if "width" in entry else name: (len(entry["ranks"]) + 1, entry.get("rank_gates", False))
        for name, entry in cored.items()
    }


def is_dense_checkpoint(files: Sequence[str]) -> bool:
    """Whether a dense model wrote these files: there is no core, nor the empty tensor that marks a compressed weight.

    Raises:
        ValueError: If a file cannot be read.
    """
    for file in files:
        with _opened(file) as checkpoint:
            for key in checkpoint.keys():
                if PARAMETER.fullmatch(key) or 0 in checkpoint.get_slice(key).get_shape():
                    return False
    return bool(files)


def read_layers(files: Sequence[str]) -> dict[str, StoredLayer]:
    """All layers that have cores or gates in ``files``, by the names they have there.

    Raises:
        ValueError: If a file cannot be read, or a core or gate is not what one can be.
    """
    layers: dict[str, StoredLayer] = {}
    for file in files:
        with _opened(file) as checkpoint:
            for key in checkpoint.keys():
                if found := PARAMETER.fullmatch(key):
                    tensor = checkpoint.get_slice(key)
                    _check_tensor(file, key, tensor.get_dtype(), tensor.get_shape())
                    layer = layers.setdefault(found[1], StoredLayer(str(file)))
                    (layer.cores if found[2] == "core" else layer.gates).append(int(found[3]))
    return layers


def _opened(file: str) -> Any:
    if not str(file).endswith(".safetensors"):
        raise ValueError(f"{file} is not a safetensors file; compressed checkpoints are read from safetensors only.")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}): it is truncated or damaged. Copy it again."
        ) from error


def _check_tensor(file: str, key: str, dtype: str, shape: list[int]) -> None:
    if dtype not in FLOATING_POINT:
        raise ValueError(
            f"{file}: {key} has dtype {dtype}, but cores and gates are floating-point numbers "
            f"({', '.join(FLOATING_POINT)}). The file is damaged or was changed; copy it again."
        )
    axes = (1,) if ".rank_gate_" in key else (3, 4)
    if len(shape) not in axes:
        raise ValueError(
            f"{file}: {key} has shape {tuple(shape)}, but is needed with {' or '.join(map(str, axes))} axes. The file "
            "is damaged or was changed; copy it again."
        )


def _check_numbers(name: str, layer: StoredLayer) -> None:
    """Cores are numbered from 0 without a gap, and there is a gate on every bond or on none."""
    for kind, numbers, wanted in (
        ("core", layer.cores, range(max(layer.cores, default=0) + 1)),
        ("rank_gate", layer.gates, range(len(layer.cores) - 1) if layer.gates else ()),
    ):
        if missing := sorted(set(wanted) - set(numbers)):
            problem = f"lacks {kind}_{missing[0]}"
        elif extra := sorted(set(numbers) - set(wanted)):
            problem = f"has {kind}_{extra[0]}, but only {len(layer.cores)} cores"
        else:
            continue
        raise ValueError(
            f"{layer.file}: {name!r} {problem}. The checkpoint is damaged: copy it again, or save the model again."
        )


def _disagreement(
    name: str, form: tuple[int, bool], stored: StoredLayer | None, files: Sequence[str], *numbers: int
) -> str:
    folder = Path(files[0]).parent
    if stored is None:
        found = f"The checkpoint has no cores for {name!r}"
    elif stored.form[0] != form[0]:
        found = f"{stored.file} has {stored.form[0]} cores for {name!r}, but config.json has factors for {form[0]}"
    else:
        words = ("has", "none") if stored.form[1] else ("has no", "some")
        found = f"{stored.file} {words[0]} rank gates for {name!r}, but config.json records {words[1]}"
    return (
        f"{found} ({folder}: config.json lists {numbers[0]} compressed layers, the weight files have {numbers[1]}). "
        "The weights and config.json are not of one save, or damaged: copy the whole folder again, save the model "
        "again, or load it with the class that saved it."
    )


def _check_saves(files: Sequence[str], config: ComeraConfig) -> None:
    """All files and the config are of one save; those of releases that wrote no id are taken as they are."""
    ids: dict[str | None, str] = {}
    records: set[str] = set()
    for file in files:
        with _opened(file) as checkpoint:
            metadata = checkpoint.metadata() or {}
        ids.setdefault(metadata.get(SAVE_ID), os.path.basename(file))
        records |= set(metadata.get(RECORDS, "").split())
    named = [f"{name} is of save {save_id or '(without an id)'}" for save_id, name in ids.items()]
    if ids.keys() != {None} and config.save_id not in ids:
        named.append(f"config.json is of save {config.save_id or '(without an id)'}")
    if len(named) > 1:
        raise ValueError(
            f"{Path(files[0]).parent} holds files of different saves: {'; '.join(named)}. {_way_out(files[0])}"
        )
    if records and record_digest(config.layers or {}) not in records:
        raise ValueError(
            f"{Path(files[0]).parent}: quantization_config.layers of config.json is not the record that was saved "
            f"with {os.path.basename(files[0])}; it was changed, or is of another model. Restore the config.json that "
            "was saved with these weights."
        )


def _way_out(file: str) -> str:
    """What to do with a folder in which a save ended half-way."""
    unfinished = next((path for path in Path(file).parent.glob(f"{UNFINISHED}*") if any(path.iterdir())), None)
    if unfinished is None:
        return "A save or a copy ended half-way. Copy the whole folder again, or save the model again."
    return f"A save ended half-way. Complete it: move all files of {unfinished} into the folder, config.json last."
