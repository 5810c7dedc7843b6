"""Which layer becomes what: a printable plan of a compression, made before a weight moves."""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.selection import ALL_LINEAR, COMPRESSIBLE_TYPES, pattern_value, select_layers
from hf_comera.modules import CompressedLayer
from hf_comera.modules.factorized_embedding import check_width
from hf_comera.ops.halves import padded_rank
from hf_comera.tt.cores import count_parameters
from hf_comera.tt.planner import RULE, prefers_dense
from hf_comera.tt.shapes import balanced_factors, check_factors, check_ranks, factorize, useful_ranks

__all__ = ["CompressionPlan", "LayerPlan", "plan"]

logger = logging.getLogger(__name__)

TIEABLE_TYPES = (nn.Embedding, nn.Linear)
"""Exact types that may use the cores of an embedding in place of its weight."""


@dataclass(kw_only=True, frozen=True)
class LayerPlan:
    """One layer: its kind, sizes, factors and ranks, and the parameters before and after (biases not counted)."""

    name: str
    kind: str
    """``"tt_linear"``, ``"ttm_embedding"`` or ``"factorized_embedding"``."""
    in_size: int
    out_size: int
    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    error: float | None = None
    """Relative Frobenius error of the decomposition; None where nothing was decomposed."""
    output_error: float | None = None
    """Relative error of the layer's outputs, where it was decomposed in their metric."""
    rank_gates: bool = False
    """Whether there are gates on the bonds, as while ranks are trained."""
    width: int | None = None
    """Columns of the narrow table of a factorized embedding, of which factors and ranks then are."""

    @property
    def dense_parameters(self) -> int:
        """Entries of the dense weight."""
        return self.in_size * self.out_size

    @property
    def parameters(self) -> int:
        """Entries of all cores."""
        if self.kind == "tt_linear":
            return count_parameters((*self.in_factors, *self.out_factors), self.ranks)
        projection = (self.width or 0) * self.out_size
        return count_parameters(_core_sizes(self.in_factors, self.out_factors), self.ranks) + projection

    @property
    def prefers_dense(self) -> bool:
        """Whether the layer multiplies by the dense matrix that its cores stand for; see ``tt/planner.py``."""
        if self.kind != "tt_linear":
            return False
        return prefers_dense(self.in_size, self.out_size, padded_rank(self.ranks[len(self.in_factors) - 1]))

    def to_json(self) -> dict[str, Any]:
        """The entry of this layer in ``ComeraConfig.layers``."""
        entry: dict[str, Any] = {
            "kind": self.kind,
            "in_factors": list(self.in_factors),
            "out_factors": list(self.out_factors),
            "ranks": list(self.ranks),
        }
        if self.rank_gates:
            entry["rank_gates"] = True
        if self.width is not None:
            entry["width"] = self.width
        errors = {"error": self.error, "output_error": self.output_error}
        return entry | {key: round(error, 6) for key, error in errors.items() if error is not None}


@dataclass(kw_only=True)
class CompressionPlan:
    """All layers that change, the ties that follow them, and the size of the whole model. Print it."""

    layers: list[LayerPlan]
    ties: dict[str, str] = field(default_factory=dict)
    """Tied module to the embedding whose cores it will use."""
    dense_parameters: int
    """Parameters of the whole model before, ties counted once."""

    @functools.cached_property
    def by_name(self) -> dict[str, LayerPlan]:
        """The layers by their names."""
        return {layer.name: layer for layer in self.layers}

    @property
    def parameters(self) -> int:
        """Parameters of the whole model after."""
        return self.dense_parameters - sum(layer.dense_parameters - layer.parameters for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Dense parameters over compressed ones, of the whole model."""
        return self.dense_parameters / max(self.parameters, 1)

    def __iter__(self) -> Iterator[LayerPlan]:
        """Iterate over the layers."""
        return iter(self.layers)

    def __str__(self) -> str:
        """The table."""
        console = Console(width=160, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __rich__(self) -> Table:
        """The table for ``rich.print``."""
        table = Table(title="Compression plan", caption=self._caption(), show_edge=False, pad_edge=False)
        errors = {"error": "error", "output_error": "outputs' error"}
        shown = {key: title for key, title in errors.items() if any(getattr(x, key) is not None for x in self.layers)}
        table.add_column("layer", no_wrap=True)
        for heading in ("kind", "factors", "ranks"):
            table.add_column(heading)
        for heading in ("dense", "compressed", "ratio", *shown.values()):
            table.add_column(heading, justify="right")
        for layer in self.layers:
            table.add_row(*_row(layer, list(shown)))
        changed = sum(layer.dense_parameters for layer in self.layers), sum(layer.parameters for layer in self.layers)
        table.add_section()
        table.add_row("compressed layers", "", "", "", *_counts(*changed))
        table.add_row("whole model", "", "", "", *_counts(self.dense_parameters, self.parameters))
        return table

    def _caption(self) -> str | None:
        grown = [layer.name for layer in self.layers if layer.parameters >= layer.dense_parameters]
        notes = [f"{tied} uses the cores of {source}" for tied, source in self.ties.items()]
        if grown:
            notes.append(f"no smaller than dense at these ranks: {', '.join(grown)}; lower rank or exclude them")
        dense = [layer.name for layer in self.layers if layer.prefers_dense]
        if dense:
            notes.append(f"multiplied as a dense matrix ({RULE}): {', '.join(dense)}")
        return "; ".join(notes) or None


def plan(model: nn.Module, config: ComeraConfig) -> CompressionPlan:
    """Decide for each layer of ``model`` what becomes of it, without touching a weight.

    Args:
        model: A dense model; may live on the meta device.
        config: What to compress. Where ``config.layers`` is filled in (a checkpoint's config), it is followed.

    Raises:
        ValueError: If a setting does not fit the model; if the model is already compressed.
    """
    if any(isinstance(module, CompressedLayer) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} already holds compressed layers. Call model.merge_and_unload() first to "
            "compress it again, or load the dense checkpoint."
        )
    if config.layers is None:
        names = _without_shared(model, select_layers(model, config), config)
        ties = _ties(model, set(names))
        layers = [_plan_layer(name, model.get_submodule(name), config) for name in names if name not in ties]
        _check_width_is_used(model, layers, config)
    else:
        layers = _recorded_layers(model, config.layers)
        ties = _ties(model, {layer.name for layer in layers})
        _check_recorded_ties(model, ties)
    return CompressionPlan(layers=layers, ties=ties, dense_parameters=sum(p.numel() for p in model.parameters()))


def _plan_layer(name: str, module: nn.Module, config: ComeraConfig) -> LayerPlan:
    in_size, out_size = _sizes(module)
    embedding = type(module) is nn.Embedding
    width = config.embedding_width if embedding else None
    if embedding:
        _check_embedding(name, module, width)
    in_factors, out_factors = _factors(name, in_size, width or out_size, embedding, config)
    sizes = _core_sizes(in_factors, out_factors) if embedding else (*in_factors, *out_factors)
    rank = pattern_value(config.rank_pattern, name)
    if isinstance(rank, list | tuple):
        check_ranks(f"rank_pattern for {name}", rank, len(sizes) - 1)
    return LayerPlan(
        name=name,
        kind="tt_linear" if not embedding else "ttm_embedding" if width is None else "factorized_embedding",
        in_size=in_size,
        out_size=out_size,
        in_factors=in_factors,
        out_factors=out_factors,
        ranks=useful_ranks(sizes, config.rank if rank is None else rank),
        width=width,
    )


def _factors(
    name: str, in_size: int, out_size: int, embedding: bool, config: ComeraConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Factors of both sides; of a factorized embedding ``out_size`` is the width of its narrow table."""
    given = pattern_value(config.factor_pattern, name) or {}
    if embedding:
        number = config.embedding_num_factors or (4 if config.embedding_width is None else 1)
        number = len(given.get("in_factors") or given.get("out_factors") or (1,) * number)
        defaults = factorize(in_size, number), balanced_factors(out_size, number)
    else:
        defaults = factorize(in_size, config.num_factors)[::-1], factorize(out_size, config.num_factors)
    in_factors = tuple(given.get("in_factors", defaults[0]))
    out_factors = tuple(given.get("out_factors", defaults[1]))
    check_factors(f"factor_pattern: in_factors of {name}", in_factors, in_size)
    check_factors(f"factor_pattern: out_factors of {name}", out_factors, out_size)
    if embedding and len(in_factors) != len(out_factors):
        raise ValueError(
            f"factor_pattern: in_factors={in_factors} and out_factors={out_factors} of {name} differ in number, but "
            f"each core of an embedding has one of both. Use out_factors={factorize(out_size, len(in_factors))}."
        )
    if embedding and config.embedding_width is not None and len(in_factors) == 1:  # a plain table, without padding
        return (in_size,), (out_size,)
    return in_factors, out_factors


def _check_embedding(name: str, module: Any, width: int | None) -> None:
    """Refuse a width that saves nothing, and what lookups change in the table, which is no longer there."""
    if width is not None:
        check_width(f"embedding_width of {name}", width, module.num_embeddings, module.embedding_dim)
    if module.max_norm is not None:
        raise ValueError(
            f"{name!r} has max_norm={module.max_norm}, with which lookups rescale rows of the dense table; a "
            f"compressed one has none. Add {name!r} to exclude_modules, or set its max_norm to None."
        )


def _check_width_is_used(model: nn.Module, layers: list[LayerPlan], config: ComeraConfig) -> None:
    """Refuse a width where there is no embedding that could have it."""
    if config.embedding_width is not None and not any(layer.kind == "factorized_embedding" for layer in layers):
        found = sorted({type(module).__name__ for module in model.modules() if isinstance(module, nn.Embedding)})
        raise ValueError(
            f"embedding_width={config.embedding_width} is for embeddings, but none is compressed in "
            f"{type(model).__name__}, whose embeddings are of type {', '.join(found) or '(none)'}. Name one of "
            "exactly the type Embedding in target_modules, or use embedding_width=None."
        )


def _recorded_layers(model: nn.Module, recorded: dict[str, dict[str, Any]]) -> list[LayerPlan]:
    """The layers of a checkpoint, found in ``model`` also where it has one base-model prefix more or less."""
    modules = dict(model.named_modules())
    prefix = getattr(model, "base_model_prefix", "") + "."
    layers = []
    for name, entry in recorded.items():
        here = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in modules), None)
        if here is not None:  # else a head of the saved model that this class does not have
            layers.append(_recorded_layer(here, modules[here], entry))
    if recorded and not layers:
        raise ValueError(
            f"None of the compressed layers of this checkpoint ({', '.join(list(recorded)[:3])}, ...) exists in "
            f"{type(model).__name__}. Load it with the class that saved it."
        )
    places = {name: place for place, name in enumerate(modules)}
    return sorted(layers, key=lambda layer: places[layer.name])  # config.json has them by the alphabet


def _recorded_layer(name: str, module: nn.Module, entry: dict[str, Any]) -> LayerPlan:
    """The layer that an entry, which is sound in itself, makes of ``module``."""
    if type(module) not in COMPRESSIBLE_TYPES or (type(module) is nn.Embedding) == (entry["kind"] == "tt_linear"):
        raise ValueError(
            f"config.json lists {name!r} with kind={entry['kind']!r}, but it is a {type(module).__name__} in this "
            "model. Restore the config.json that was saved with these weights, or load them with the class that did."
        )
    in_size, out_size = _sizes(module)
    for side, size in (("in_factors", in_size), ("out_factors", entry.get("width") or out_size)):
        check_factors(f"config.json, layers[{name!r}]: {side}", tuple(entry[side]), size)
    values: dict[str, Any] = {key: tuple(entry[key]) for key in ("in_factors", "out_factors", "ranks")}
    values |= {key: entry.get(key) for key in ("error", "output_error", "width")}
    values["rank_gates"] = entry.get("rank_gates", False)
    return LayerPlan(name=name, kind=entry["kind"], in_size=in_size, out_size=out_size, **values)


def _ties(model: nn.Module, selected: set[str]) -> dict[str, str]:
    """Modules whose weight is tied to that of a selected embedding; these will use its cores."""
    return {target: source for target, source in _shared_weights(model) if source in selected}


def _shared_weights(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of modules that share a weight: the tied one, and the one that owns it."""
    return [
        (target.rpartition(".")[0], source.rpartition(".")[0])
        for target, source in getattr(model, "all_tied_weights_keys", {}).items()
        if source.endswith(".weight")
    ]


def _without_shared(model: nn.Module, names: list[str], config: ComeraConfig) -> list[str]:
    """``names`` without layers that share a weight in a way that cores cannot; these stay dense.

    Tensor trains cannot share a weight, so linear layers that do stay dense. An embedding shares its cores with plain
    heads and embeddings only: one that scales its rows, say, would lose the scale.
    """
    pairs = _shared_weights(model)
    dense: dict[str, str] = {}
    for target, source in pairs:
        if not isinstance(model.get_submodule(source), nn.Embedding):
            dense[target] = f"shares its weight with {source!r}, and both are linear layers"
            dense[source] = f"shares its weight with {target!r}, and both are linear layers"
        elif type(model.get_submodule(target)) not in TIEABLE_TYPES and source in names:
            reason = f"shares its weight with {target!r}, a {type(model.get_submodule(target)).__name__}"
            dense |= {name: reason for name, owner in (*pairs, (source, source)) if owner == source}
    for target, source in pairs:
        if target in names and target not in dense and source not in names:
            if config.target_modules not in (None, ALL_LINEAR):
                raise ValueError(
                    f"target_modules: {target!r} shares its weight with {source!r}, which is not selected. Target "
                    f"{source!r} (the tied layer then uses its cores), or exclude {target!r}."
                )
            dense[target] = f"shares its weight with {source!r}, which is not selected"
    left = [name for name in names if name in dense]
    if left:
        logger.warning(
            "%d layers that share a weight stay dense, for example %s, which %s.", len(left), left[0], dense[left[0]]
        )
    return [name for name in names if name not in dense]


def _check_recorded_ties(model: nn.Module, ties: dict[str, str]) -> None:
    """Refuse a record of a release that tied whatever shared a weight, and lost what it computes beside."""
    for target, source in ties.items():
        kind = type(model.get_submodule(target))
        if kind not in TIEABLE_TYPES:
            raise ValueError(
                f"config.json lists {source!r}, whose weight {target!r} shares, a {kind.__name__}. An earlier release "
                "lost what such a layer computes of its own. Compress the dense model again; the embedding then "
                "stays dense."
            )


def _sizes(module: nn.Module) -> tuple[int, int]:
    """``(in, out)``: features of a linear layer; vocabulary and hidden size of an embedding."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    rows, columns = module.get_parameter("weight").shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def _core_sizes(in_factors: tuple[int, ...], out_factors: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(v * h for v, h in zip(in_factors, out_factors, strict=True))


def _row(layer: LayerPlan, errors: list[str]) -> list[str]:
    factors = f"{_times(layer.in_factors)} -> {_times(layer.out_factors)}"
    values = [getattr(layer, key) for key in errors]
    counts = _counts(layer.dense_parameters, layer.parameters)
    kind = layer.kind if layer.width is None else f"{layer.kind} ({layer.width} wide)"
    return [
        layer.name,
        kind,
        factors,
        " ".join(map(str, layer.ranks)),
        *counts,
        *("" if value is None else f"{value:.4f}" for value in values),
    ]


def _times(factors: tuple[int, ...]) -> str:
    return "x".join(map(str, factors))


def _counts(dense: int, compressed: int) -> list[str]:
    return [f"{dense:,}", f"{compressed:,}", f"{dense / max(compressed, 1):.1f}x"]
