"""Checkpoints of compressed models: a folder is checked before it is loaded, and written whole or not at all.

The contents of the files, and whether they belong together, are checked before a module is replaced or a weight is
read. So a refused file leaves the model as it was.

Renaming several files is not one step, and a process may end between two. So all weight files and ``config.json`` of
one save carry the same id. A mixture of two saves, which would compute something else in silence, is refused when it
is loaded. The error names the files that are still to be moved.
"""

import contextlib
import errno
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.record import record_digest
from hf_comera.ops.quantization import check_packed

__all__ = [
    "NOTICE",
    "RECORDS",
    "SAVE_ID",
    "UNFINISHED",
    "PackedTensor",
    "StoredLayer",
    "atomic_save",
    "check_checkpoint",
    "disk_refusal",
    "is_dense_checkpoint",
    "new_save_id",
    "read_layers",
    "stamped",
    "sync",
]

FLOATING_POINT = ("F64", "F32", "F16", "BF16")
"""The dtypes of safetensors in which cores and gates are taken."""

PACKED = {"I8": torch.int8, "U8": torch.uint8}
"""Those of weights that are stored in int8 and in int4, where ``ComeraConfig.storage`` says that there are any."""

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


@dataclass(frozen=True)
class PackedTensor:
    """A weight in int8 or int4 as the header of its file has it."""

    file: str
    rows: int
    widths: tuple[int, ...]
    """Entries that a row may have: of int4 the last byte, and not the header, says which of two."""

    def check(self, name: str, shape: Sequence[int], *, any_rank: bool) -> None:
        """Refuse a tensor that cannot be the weight ``name`` of the model.

        Args:
            name: As the file has it.
            shape: Of the weight.
            any_rank: Whether its first and last axis may have other sizes.

        Raises:
            ValueError: With the file, the name, both shapes and what to do.
        """
        inner = math.prod(shape[1:-1])
        whole = self.rows == shape[0] and math.prod(shape[1:]) in self.widths
        if whole or (any_rank and inner and any(width % inner == 0 for width in self.widths)):
            return
        wanted = ("r", *shape[1:-1], "r") if any_rank else tuple(shape)
        raise ValueError(
            f"{self.file}: {name} holds {self.rows} rows of {self.widths[0]} entries in int8 or int4, but the model "
            f"needs the shape ({', '.join(map(str, wanted))}). The file is damaged or belongs to another config.json: "
            "copy the whole folder again, or save the model again."
        )


def check_checkpoint(files: Sequence[str], config: ComeraConfig) -> dict[str, PackedTensor]:
    """Refuse files that are damaged, do not belong together, or lack what ``config`` says of them.

    Args:
        files: Paths of the weight files.
        config: The settings of the model that is about to be built. It may be a part of a larger one, in whose files
            there are more layers than the record of the part has.

    Returns:
        The tensors that hold weights in int8 or int4, by the names that they have there.

    Raises:
        ValueError: With the file, the layer, what was found and what to do.
    """
    stored = read_layers(files, packs=config.packs)
    if not config.layers and (config.layers is None or stored or not config.packs):
        raise ValueError(
            f"{files[0]}: config.json says quant_method='comera', but its quantization_config.layers names no "
            "compressed layer. Restore the config.json that was saved with these weights."
        )
    _check_saves(files, config)
    recorded = _with_cores(config.layers)
    if recorded and not stored:
        raise ValueError(
            f"{files[0]} holds no tensor-train cores, though config.json says quant_method='comera'. Restore the "
            "matching file, or remove quantization_config from config.json."
        )
    for name, layer in stored.items():
        _check_numbers(name, layer)
    if not Counter(recorded.values()) - Counter(layer.form for layer in stored.values()):
        return _packed_tensors(files) if config.packs else {}
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


def _packed_tensors(files: Sequence[str]) -> dict[str, PackedTensor]:
    """The tensors that hold weights in int8 or int4.

    Raises:
        ValueError: If one has a shape that none of them has.
    """
    found = {}
    for file in files:
        with _opened(file) as checkpoint:
            for key in checkpoint.keys():
                tensor = checkpoint.get_slice(key)
                if tensor.get_dtype() in PACKED:
                    width = _check_packed(file, key, tensor.get_dtype(), tensor.get_shape())
                    widths = (width,) if tensor.get_dtype() == "I8" else (width, width - 1)
                    found[key] = PackedTensor(str(file), tensor.get_shape()[0], widths)
    return found


def _check_packed(file: str, key: str, dtype: str, shape: list[int]) -> int:
    try:
        return check_packed(PACKED[dtype], shape)
    except ValueError as error:
        raise ValueError(
            f"{file}: {key} has dtype {dtype} and shape {tuple(shape)}, in which no weight is stored: {error}. The "
            "file is damaged or was changed; copy it again, or save the model again."
        ) from error


def read_layers(files: Sequence[str], *, packs: bool = False) -> dict[str, StoredLayer]:
    """All layers that have cores or gates in ``files``, by the names they have there.

    Args:
        files: Paths of the weight files.
        packs: Whether cores may be stored in int8 or int4.

    Raises:
        ValueError: If a file cannot be read, or a core or gate is not what one can be.
    """
    layers: dict[str, StoredLayer] = {}
    for file in files:
        with _opened(file) as checkpoint:
            for key in checkpoint.keys():
                if found := PARAMETER.fullmatch(key):
                    tensor = checkpoint.get_slice(key)
                    if not (packs and tensor.get_dtype() in PACKED):  # these are checked with all that is packed
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
    """The remedy for a folder in which a save ended half-way."""
    unfinished = next((path for path in Path(file).parent.glob(f"{UNFINISHED}*") if any(path.iterdir())), None)
    if unfinished is None:
        return "A save or a copy ended half-way. Copy the whole folder again, or save the model again."
    return f"A save ended half-way. Complete it: move all files of {unfinished} into the folder, config.json last."


SAVE_ID, RECORDS = "hf_comera_save_id", "hf_comera_records"
"""Names in the metadata of safetensors files: of the id, and of digests of the records of layers that go with it."""

NOTICE = "CANNOT BE LOADED WITHOUT import hf_comera BEFORE from_pretrained, pip install hf_comera"
"""The name of an empty tensor: Transformers lists it where it loads the file without this library.

Only letters and commas, since some architectures read names as regular expressions.
"""

UNFINISHED = ".saving-"
"""How the names of folders begin in which a save is being written."""

_OF_TORCH = ("PytorchStreamWriter", "inline_container", "iostream error", "Parent directory")
"""In errors of ``torch.save`` where the disk is full or the folder is gone."""

ABANDONED_SECONDS = 3600
"""Folders of saves that are older than this are removed by the next save: no save takes so long."""


def new_save_id() -> str:
    """An id that no other save has; random numbers of torch and Python are left as they are."""
    return secrets.token_hex(8)


def atomic_save(save: Callable[..., Any], directory: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Run ``save(temporary folder)`` and move what it wrote to ``directory``; on an error nothing there changes.

    Weight files of an earlier save of the same variant that the new one does not have (other shards) are removed; all
    other files stay.

    Args:
        save: Writes a checkpoint into the folder that it is given.
        directory: Where the checkpoint belongs; made if missing.
        options: The caller's options for ``save_pretrained``: a push without ``repo_id`` is named after ``directory``.

    Raises:
        ValueError: If ``directory`` is a file.
        OSError: If it cannot be written, or the disk is full.
    """
    target = Path(directory)
    if target.is_file():
        raise ValueError(
            f"save_directory={str(target)!r} is a file; give a folder, for example {str(target) + '-tt'!r}."
        )
    if options.get("push_to_hub"):
        save = _with_repo_id(save, target, options)
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=target))
        try:
            save(temporary)
            _move_in(temporary, target, options.get("variant"))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except BaseException as error:
        if is_new:
            with contextlib.suppress(OSError):  # not empty: another process of the run saves there
                target.rmdir()
        refusal = disk_refusal(error)
        if refusal is None:
            raise
        raise OSError(
            refusal[0],
            f"The model could not be saved ({refusal[1]}); the checkpoint that was there is still whole. Make "
            "room, or give a folder that can be written",
            str(target),
        ) from error


def disk_refusal(error: BaseException) -> tuple[int, str] | None:
    """Number and words of what the operating system refused; None if it was something else that went wrong.

    Libraries in Rust name it in their own errors, and ``torch.save`` says no more than that it could not write.
    """
    if isinstance(error, OSError):
        return None if error.errno is None else (error.errno, os.strerror(error.errno))
    if code := re.search(r"\(os error (\d+)\)", str(error)):
        return int(code[1]), os.strerror(int(code[1]))
    if any(words in str(error) for words in _OF_TORCH):
        return errno.EIO, "torch.save could not write a file"
    return None


@contextlib.contextmanager
def stamped(model: PreTrainedModel, state_dict: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[None]:
    """Within, ``model.save_pretrained`` writes ``state_dict``, with ``metadata`` in every weight file.

    Transformers takes metadata from a quantizer only, so there is one for the time of the save.
    """
    model.hf_quantizer = _StateAndMetadata(state_dict, metadata)  # type: ignore[assignment]
    try:
        yield
    finally:
        del model.hf_quantizer


class _StateAndMetadata(HfQuantizer):
    """Hands a state and metadata to ``save_pretrained``; quantizes nothing."""

    def __init__(self, state_dict: dict[str, Tensor], metadata: dict[str, str]) -> None:
        self.state_dict, self.metadata = state_dict, metadata

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and the metadata to save."""
        return self.state_dict, dict(self.metadata)

    def is_serializable(self) -> bool:
        """Asked by ``save_pretrained``."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Not called during a save."""
        return True


def _move_in(temporary: Path, target: Path, variant: str | None) -> None:
    """Weights, then their index, then ``config.json``, before which old weights go that nothing replaced.

    At no moment can a folder be read as a third model. Until the index is there the old files are found, or files of
    two saves are, which is refused.
    """
    written = sorted(temporary.iterdir(), key=lambda path: (path.name == "config.json", path.suffix == ".json"))
    for path in written:
        sync(path)
    for path in written:
        if path.name == "config.json":
            _remove_stale_weights(target, {path.name for path in written}, variant)
        os.replace(path, target / path.name)
        sync(target)
    for left in target.glob(f"{UNFINISHED}*"):
        if left != temporary and time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the contents of a file, or the names in a folder, on the disk before anything that follows."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_repo_id(save: Callable[..., Any], target: Path, options: dict[str, Any]) -> Callable[..., Any]:
    def save_and_push(folder: Path) -> None:
        save(folder, repo_id=options.get("repo_id", target.name))

    return save_and_push


def _remove_stale_weights(target: Path, written: set[str], variant: str | None) -> None:
    """Only when new weights replace them: other ranks of a distributed save write no weights."""
    ending = f".{re.escape(variant)}" if variant else ""
    shard = r"(-\d{5}-of-\d{5})?"
    weights = re.compile(rf"model{ending}{shard}\.safetensors|model\.safetensors\.index{ending}\.json")
    if not any(weights.fullmatch(name) for name in written):
        return
    for path in target.iterdir():
        if path.name not in written and weights.fullmatch(path.name):
            path.unlink()
