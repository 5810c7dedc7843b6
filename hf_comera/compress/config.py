"""``ComeraConfig``: the layers to compress and how far; stored in ``config.json`` as a quantization config."""

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_comera.compress.record import check_record, refuse_rank_activation

__all__ = ["FORMAT_VERSION", "OTHERS", "STORAGES", "ComeraConfig", "check_storage"]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 5
"""Newest version of the checkpoint format; raised when older releases could not read all that may be written.

1: the format of the first release. 2: layers might have a rank activation, which is refused. 3: layers may have rank
gates, or no rank at all. 4: embeddings may be factorized. 5: weights may be stored in int8 or int4. A checkpoint says
the lowest version that has all it uses, so that older releases go on reading what they can.
"""

STORAGES = {"float": None, "int8": 8, "int4": 4}
"""The values of ``storage``, and the bits of the integers that weights become."""

OTHERS = "*"
"""In ``storage``, stands for all layers that no pattern matches."""


@dataclass(kw_only=True)
class ComeraConfig(QuantizationConfigMixin):
    """Which layers become tensor trains, with which factors and ranks.

    Patterns are matched as PEFT does: a list holds last parts of module names, a string is a regular expression that
    must match a whole name. Pattern dictionaries map such an expression for the end of a name to a value.

    Raises:
        ValueError: If a rank, a number of factors or a factor is not a positive integer, or names or patterns have
            another type. Also if there is a ``rank_activation``, which earlier releases had.
    """

    target_modules: list[str] | str | None = None
    """Layers to compress: last parts of names, a regular expression, ``"all-linear"``, or None for the attention and
    FFN projections and the word embedding of the architecture."""

    exclude_modules: list[str] | str | None = None
    """Layers to leave dense although they are targeted; same forms."""

    rank: int = 30
    """Largest rank of every bond; clipped per bond to what the factors can use. Source: CoMERA's experiments."""

    num_factors: int = 3
    """Factors per side of a linear layer: a d-factor layer has 2 d cores."""

    embedding_num_factors: int | None = None
    """Factors of an embedding's vocabulary and hidden size: as many cores. None: four, or one with
    ``embedding_width``, whose narrow table is then plain; with more it is held as TTM cores itself."""

    embedding_width: int | None = None
    """Factorise embeddings in place of TTM cores: a narrow table of so many columns, and a projection to the hidden
    size. Tied heads use both, so that logits are products of this width. Source: ALBERT, arXiv:1909.11942."""

    rank_pattern: dict[str, int | list[int]] = field(default_factory=dict)
    """Ranks of particular layers: pattern to one rank or one rank per bond."""

    factor_pattern: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Factors of particular layers: pattern to ``{"in_factors": [...], "out_factors": [...]}`` (of an embedding:
    vocabulary and hidden size). A product above the size is padding."""

    storage: str | dict[str, str] | None = None
    """Form in which ``save_pretrained`` stores weights: ``"int8"`` or ``"int4"`` rows with scales. Or a
    dictionary of patterns for layers, with ``"*"`` for all others: ``{"word_embeddings": "int4", "*": "int8"}``; the
    longest that matches decides. None, or ``"float"``: as they are. Loaded weights are floating-point numbers."""

    target_ratio: float | None = None
    """Wanted size of a trained model that is decomposed, as part of its dense parameters (0.25: a quarter). Formats
    and ranks are then chosen by a calibration, and ``rank`` and the numbers of factors have no effect."""

    target_parameters: int | None = None
    """The same as a number of parameters; one of the two."""

    calibration: str | None = None
    """Folder of a saved ``Calibration``, for ``from_pretrained`` of a dense checkpoint; it is not written to
    ``config.json``. With a live model it is an argument of ``get_comera_model``."""

    layers: dict[str, dict[str, Any]] | None = None
    """The compressed layers: filled in by the library, read back at load time. Leave it None."""

    save_id: str | None = None
    """Which save wrote the weights that belong to this config: filled in by ``save_pretrained``. Leave it None."""

    quant_method: str = "comera"  # type: ignore[assignment]  # an enum of built-in methods there
    """The name under which Transformers finds this method."""

    rank_activation: InitVar[None] = None
    """Removed, and refused by name; None, as earlier releases wrote it into every config, is taken and not kept."""

    def __post_init__(self, rank_activation: object) -> None:
        """Check what can be checked without a model."""
        refuse_rank_activation(rank_activation)
        for name in ("rank", "num_factors", "embedding_num_factors", "embedding_width"):
            if getattr(self, name) is not None or name in ("rank", "num_factors"):
                _check_positive(name, getattr(self, name))
        _check_target(self.target_ratio, self.target_parameters)
        for name in ("target_modules", "exclude_modules"):
            _check_names(name, getattr(self, name))
        _check_patterns("rank_pattern", self.rank_pattern, '{"query": 8}')
        _check_patterns("factor_pattern", self.factor_pattern, '{"query": {"in_factors": [12, 8, 8]}}')
        for pattern, ranks in self.rank_pattern.items():
            for rank in ranks if isinstance(ranks, list | tuple) else [ranks]:
                _check_positive(f"rank_pattern[{pattern!r}]", rank)
        for pattern, sides in self.factor_pattern.items():
            if not isinstance(sides, Mapping) or not set(sides) <= {"in_factors", "out_factors"} or not sides:
                raise ValueError(
                    f"factor_pattern[{pattern!r}]={sides!r} is needed as a dictionary with in_factors, out_factors or "
                    'both, for example {"in_factors": [12, 8, 8], "out_factors": [8, 8, 12]}.'
                )
            for side, factors in sides.items():
                if not isinstance(factors, list | tuple):
                    raise ValueError(
                        f"factor_pattern[{pattern!r}][{side!r}]={factors!r} is needed as a list of factors, for "
                        "example [12, 8, 8]."
                    )
        check_storage(self.storage)
        if isinstance(self.target_modules, list | tuple | set) and not self.target_modules and not self.packs:
            raise ValueError(
                "target_modules=[] selects nothing. Use None for the defaults of the architecture. For a dense model "
                'that is only stored smaller, add storage="int8".'
            )

    @property
    def packs(self) -> bool:
        """Whether some weights may be stored as integers."""
        values = self.storage.values() if isinstance(self.storage, Mapping) else [self.storage or "float"]
        return any(STORAGES[value] for value in values)

    @property
    def format_version(self) -> int:
        """The lowest version of the checkpoint format that has all of these settings."""
        recorded = (self.layers or {}).values()
        if self.packs:
            return 5
        if self.embedding_width is not None or any(entry.get("kind") == "factorized_embedding" for entry in recorded):
            return 4
        return 3 if any(entry.get("rank_gates") or 0 in entry.get("ranks", ()) for entry in recorded) else 1

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Rebuild the config of a checkpoint; settings of a newer release that do not change the format are named.

        Raises:
            ValueError: If the checkpoint has a newer format than this release reads, or a setting or an entry of
                ``layers`` cannot be.
        """
        _check_format(config_dict.get("format_version", FORMAT_VERSION))
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(config_dict) - known - {"format_version", "rank_activation"})
        if unknown:
            logger.warning("Settings %s of the checkpoint are unknown to this release and have no effect.", unknown)
        try:
            settings = {name: value for name, value in config_dict.items() if name in known}
            config = cls(**settings, rank_activation=config_dict.get("rank_activation"))
            check_record(config.layers)
        except ValueError as error:
            raise ValueError(f"config.json, quantization_config: {error}") from error
        unused = {name: value for name, value in kwargs.items() if name not in known}
        for name in set(kwargs) & known:
            setattr(config, name, kwargs[name])
        config.__post_init__(kwargs.get("rank_activation"))
        return (config, unused) if return_unused_kwargs else config

    def get(self, name: str, default: Any = None) -> Any:
        """A setting by its name, as of a dictionary: so Transformers asks the config of a model in memory."""
        return getattr(self, name, default)

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON values."""
        values = {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self)}
        del values["calibration"]  # a folder of the machine that made the checkpoint
        for name in ("embedding_num_factors", "embedding_width", "target_ratio", "target_parameters"):
            if values[name] is None:  # older releases take no None for the first
                del values[name]
        if not self.packs:  # older releases read the checkpoint
            del values["storage"]
        if isinstance(self.target_modules, tuple | set):
            values["target_modules"] = sorted(self.target_modules)
        return {**values, "format_version": self.format_version}


def _check_format(written: Any) -> None:
    """Refuse the version of a format that this release cannot read."""
    if isinstance(written, bool) or not isinstance(written, int) or written < 1:
        raise ValueError(
            f"config.json, quantization_config: format_version={written!r} is no version; it is an integer from 1 to "
            f"{FORMAT_VERSION}. Restore the config.json that was saved with these weights."
        )
    if written > FORMAT_VERSION:
        raise ValueError(
            f"The checkpoint has hf_comera format_version={written!r}, but this release reads up to "
            f"{FORMAT_VERSION}. Install a newer hf_comera: pip install --upgrade hf_comera."
        )


def _check_names(name: str, value: Any) -> None:
    """Names of layers are None, one expression, or several last parts of names."""
    listed = isinstance(value, list | tuple | set) and all(isinstance(part, str) for part in value)
    if value is not None and not isinstance(value, str) and not listed:
        raise ValueError(
            f"{name}={value!r} is needed as a list of names, for example ['query', 'value'], a regular expression, or "
            "None."
        )


def _check_patterns(name: str, value: Any, example: str) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError(
            f"{name}={value!r} is needed as a dictionary of patterns for names of layers, for example "
            f"{name}={example}."
        )


def check_storage(value: Any) -> None:
    """Refuse what is no setting of ``storage``.

    Raises:
        ValueError: With the value, and one that works.
    """
    patterns = value if isinstance(value, Mapping) else {}
    values = list(patterns.values()) if isinstance(value, Mapping) else [] if value is None else [value]
    if all(isinstance(one, str) and one in STORAGES for one in values) and all(map(_is_pattern, patterns)):
        return
    raise ValueError(
        f"storage={value!r} is needed as {', '.join(map(repr, STORAGES))}, or a dictionary of patterns for names of "
        f'layers with one of these each, for example storage={{"word_embeddings": "int4", "{OTHERS}": "int8"}}.'
    )


def _is_pattern(pattern: Any) -> bool:
    try:
        return isinstance(pattern, str) and (pattern == OTHERS or re.compile(pattern) is not None)
    except re.error:
        return False


def _check_target(ratio: Any, parameters: Any) -> None:
    """At most one wanted size, and one that can be."""
    if ratio is not None and parameters is not None:
        raise ValueError(
            f"target_ratio={ratio!r} and target_parameters={parameters!r} both name a size. Leave one of them None."
        )
    number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if ratio is not None and not (number and 0 < ratio < 1):
        raise ValueError(
            f"target_ratio={ratio!r} is needed as the part of the dense parameters that is left, between 0 and 1, for "
            "example target_ratio=0.25."
        )
    if parameters is not None:
        _check_positive("target_parameters", parameters)


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        examples = {"rank": 30, "width": 128, "target_parameters": 5_000_000}
        example = next((value for part, value in examples.items() if part in name), 3)
        raise ValueError(f"{name}={value!r} is not a positive integer. Use at least 1, for example {name}={example}.")
