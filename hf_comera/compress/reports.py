"""Reports on a compressed model: parameters and bytes, ranks, and the parts that stay dense."""

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from hf_comera.compress.selection import COMPRESSIBLE_TYPES
from hf_comera.compress.storage import stored_bytes
from hf_comera.modules import CompressedLayer, TensorTrainModule, compressed_layers

__all__ = [
    "DensePart",
    "RankHistory",
    "RankReport",
    "SizeReport",
    "dense_parts",
    "print_trainable_parameters",
    "rank_report",
    "size_report",
    "warn_if_mostly_dense",
]


@dataclass(frozen=True, kw_only=True)
class SizeReport:
    """Sizes of a whole model and of its compressed layers; tied weights count once."""

    dense_parameters: int
    parameters: int
    trainable_parameters: int
    dense_bytes: int
    bytes: int
    compressed_dense_parameters: int
    """Entries of the dense weights that the compressed layers stand for."""
    compressed_parameters: int
    """Entries of all cores, and of the tables and projections of factorized embeddings."""
    stored_bytes: int
    """Of the parameters in a checkpoint, which may store them in int8 or int4; else the same as ``bytes``."""
    gate_parameters: int = 0
    """Entries of all rank gates, which are gone when training ends; the dense model has none."""

    @property
    def ratio(self) -> float:
        """Dense over compressed parameters of the whole model."""
        return self.dense_parameters / max(self.parameters, 1)

    @property
    def compressed_ratio(self) -> float:
        """Dense over compressed parameters of the compressed layers alone; 1 if there are none."""
        return self.compressed_dense_parameters / self.compressed_parameters if self.compressed_parameters else 1.0

    def __str__(self) -> str:
        """One line for logs."""
        stored = "" if self.stored_bytes == self.bytes else f", stored in {_megabytes(self.stored_bytes)}"
        return (
            f"parameters: {self.parameters:,} ({_megabytes(self.bytes)}{stored}), dense: {self.dense_parameters:,} "
            f"({_megabytes(self.dense_bytes)}), ratio {self.ratio:.1f}x; compressed layers: "
            f"{self.compressed_parameters:,} for {self.compressed_dense_parameters:,}, {self.compressed_ratio:.1f}x; "
            f"trainable: {self.trainable_parameters:,} ({self.trainable_parameters / max(self.parameters, 1):.1%})"
        )


def size_report(model: nn.Module) -> SizeReport:
    """Count the parameters and bytes of ``model`` (any model; only compressed layers differ from dense)."""
    layers = compressed_layers(model).values()
    compressed = sum(module.num_core_parameters for module in layers)
    dense = sum(module.num_dense_parameters for module in layers)
    parameters = list(model.parameters())
    gates = sum(gate.numel() for module in layers for gate in module.rank_gates())
    own_bytes = sum(p.numel() * p.element_size() for module in layers for p in module.tt_parameters())
    dense_bytes = sum(module.num_dense_parameters * module.cores()[0].element_size() for module in layers)
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    total, total_bytes = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    return SizeReport(
        dense_parameters=total - compressed - gates + dense,
        parameters=total,
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        dense_bytes=total_bytes - own_bytes + dense_bytes,
        bytes=total_bytes,
        stored_bytes=stored_bytes(model, config.storage) if getattr(config, "packs", False) else total_bytes,
        compressed_dense_parameters=dense,
        compressed_parameters=compressed,
        gate_parameters=gates,
    )


def print_trainable_parameters(model: nn.Module) -> None:
    """Print parameters and bytes, dense and compressed, and the ratios."""
    print(size_report(model))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


@dataclass
class RankHistory:
    """The history that rank adaptation leaves with the model, for the report."""

    ranks_before: dict[str, list[int]] = field(default_factory=dict)
    """Ranks of each layer when the adaptation began."""
    steps: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    """Parameters of the whole model, gates not counted, at each of ``steps``."""

    def record(self, step: int, parameters: int) -> None:
        """Add a point of the curve of sizes."""
        self.steps.append(step)
        self.parameters.append(parameters)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Ranks of every layer. Print it, or :meth:`plot` it."""

    before: dict[str, tuple[int, ...]]
    after: dict[str, tuple[int, ...]]
    parameters: int
    dense_parameters: int
    steps: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The table."""
        console = Console(width=140, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __rich__(self) -> Table:
        """The table for ``rich.print``."""
        caption = f"{self.parameters:,} parameters, {self.dense_parameters / max(self.parameters, 1):.1f}x below dense"
        if self.sizes:
            caption += f"; {self.sizes[0]:,} when rank adaptation began"
        table = Table(title="Ranks", caption=caption, show_edge=False, pad_edge=False)
        for heading in ("layer", "before", "after"):
            table.add_column(heading, no_wrap=heading == "layer")
        for name, after in self.after.items():
            shown = " ".join(map(str, after)) if any(after) or not after else "removed"
            table.add_row(name, " ".join(map(str, self.before[name])), shown)
        return table

    def plot(self, path: str | Path) -> Path:
        """Draw the heat maps layer x bond before and after, and the size over the steps, into a picture.

        Where no rank has changed there is one heat map.

        Args:
            path: Where to write it; the ending decides the format.

        Returns:
            ``path``.

        Raises:
            ImportError: If matplotlib is missing.
            ValueError: If the model has no layer in tensor-train form.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError('RankReport.plot needs matplotlib: pip install "hf_comera[plots]".') from error
        if not self.after:
            raise ValueError(
                "The model has no layer in tensor-train form to draw. Make one with "
                "get_comera_model(model, ComeraConfig(rank=30))."
            )
        maps = (
            {"ranks": self.after}
            if self.before == self.after
            else {"ranks before": self.before, "ranks after": self.after}
        )
        widths = (1,) * len(maps) + ((1.2,) if len(self.steps) > 1 else ())
        height = max(3.0, 0.22 * len(self.after) + 1.2)
        figure = Figure(figsize=(1 + 4 * sum(widths), height), layout="constrained")
        axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        highest = max((rank for ranks in self.before.values() for rank in ranks), default=1)
        for axis, (title, ranks) in zip(axes, maps.items(), strict=False):
            image = _heat_map(axis, title, ranks, highest, named=axis is axes[0])
        figure.colorbar(image, ax=axes[: len(maps)].tolist(), shrink=0.8, label="rank")
        if len(self.steps) > 1:
            axes[-1].plot(self.steps, self.sizes, drawstyle="steps-post")
            axes[-1].set(title="size", xlabel="step", ylabel="parameters", ylim=(0, None))
            axes[-1].grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        return Path(path)


def rank_report(model: nn.Module) -> RankReport:
    """The ranks of ``model`` now and, if they were trained in this process or a resumed one, before."""
    history: RankHistory = model.__dict__.get("_rank_history") or RankHistory()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TensorTrainModule)}
    report = size_report(model)
    return RankReport(
        before={name: tuple(history.ranks_before.get(name, module.ranks)) for name, module in layers.items()},
        after={name: module.ranks for name, module in layers.items()},
        parameters=report.parameters - report.gate_parameters,
        dense_parameters=report.dense_parameters,
        steps=tuple(history.steps),
        sizes=tuple(history.parameters),
    )


def _heat_map(axis: Any, title: str, ranks: dict[str, tuple[int, ...]], highest: int, *, named: bool) -> Any:
    """One row a layer, one column a bond; bonds that a layer lacks stay blank."""
    width = max(1, *(len(row) for row in ranks.values()))
    values = [[float(rank) for rank in row] + [float("nan")] * (width - len(row)) for row in ranks.values()]
    image = axis.imshow(values, aspect="auto", vmin=0, vmax=highest, cmap="viridis", interpolation="nearest")
    axis.set(title=title, xlabel="bond", xticks=range(width), yticks=range(len(ranks)))
    axis.set_yticklabels(list(ranks) if named else [], fontsize=6)
    if len(ranks) <= 60:
        for row, bonds in enumerate(ranks.values()):
            for column, rank in enumerate(bonds):
                color = "black" if rank > 0.6 * highest else "white"
                axis.text(column, row, rank, ha="center", va="center", fontsize=5, color=color)
    return image


logger = logging.getLogger(__name__)

SMALLEST_COMPRESSED_SHARE = 0.5
"""Of the parameters of a dense model; where less of them is compressed, the whole model hardly shrinks."""

LISTED_PARTS, SMALLEST_LISTED_SHARE = 3, 0.05


@dataclass(frozen=True, kw_only=True)
class DensePart:
    """Parameters that stay as they are: one of each layer of a stack counts as one part."""

    pattern: str
    """Name of the parameter, with ``*`` for the numbers of layers."""
    parameters: int
    reason: str
    """Why it is no tensor train."""


def dense_parts(model: nn.Module) -> list[DensePart]:
    """All parameters that are not of compressed layers, the largest part first; shared ones count once."""
    sizes: dict[tuple[str, str], int] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        trained = {id(p) for p in module.tt_parameters()} if isinstance(module, CompressedLayer) else set()
        for name, parameter in module.named_parameters(module_name, recurse=False):
            if id(parameter) not in seen | trained:
                pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
                key = (pattern, _reason(module, name.rpartition(".")[2], parameter))
                sizes[key] = sizes.get(key, 0) + parameter.numel()
            seen.add(id(parameter))
    parts = [DensePart(pattern=pattern, parameters=size, reason=why) for (pattern, why), size in sizes.items()]
    return sorted(parts, key=lambda part: -part.parameters)


def warn_if_mostly_dense(model: nn.Module) -> None:
    """Say so where less than half of the parameters is in compressed layers, with the largest parts that are not.

    A dense model that is only stored smaller has none, as was asked for.
    """
    report = size_report(model)
    share = report.compressed_dense_parameters / max(report.dense_parameters, 1)
    if share >= SMALLEST_COMPRESSED_SHARE or not report.compressed_parameters:
        return
    listed = [
        f"{part.parameters / report.dense_parameters:.0%} {part.pattern} ({part.reason})"
        for part in dense_parts(model)[:LISTED_PARTS]
        if part.parameters >= SMALLEST_LISTED_SHARE * report.dense_parameters
    ]
    logger.warning(
        "Only %.0f %% of the parameters of %s are in compressed layers, so the whole model is %.2f times smaller. The "
        "largest parts that stay dense: %s. Tensor trains replace the weights of layers of exactly the types Linear, "
        "Conv1D and Embedding; target_modules names them.",
        *(100 * share, type(model).__name__, report.ratio, ", ".join(listed)),
    )


def _reason(module: nn.Module, name: str, parameter: Tensor) -> str:
    """The reason why a parameter of ``module`` is no tensor train."""
    kind = type(module).__name__
    if type(module) in COMPRESSIBLE_TYPES and name == "weight":
        return f"{kind} that is not targeted"
    base = next((base.__name__ for base in COMPRESSIBLE_TYPES if isinstance(module, base)), None)
    if base is not None and type(module) not in COMPRESSIBLE_TYPES and name == "weight":
        return f"{kind}, which may compute more than {base}"
    if parameter.dim() > 2:
        return f"{parameter.dim()} dimensions, in {kind}"
    return f"in {kind}"
