"""``RankReport``: the ranks of every layer before and after training, the size over the steps; a table, a picture."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from hf_comera.compress.size import size_report
from hf_comera.modules import TensorTrainModule

__all__ = ["RankHistory", "RankReport", "rank_report"]


@dataclass
class RankHistory:
    """What rank adaptation leaves with the model, for the report."""

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
        console = Console(width=140, record=False, no_color=True)
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
    trains = {name: module for name, module in model.named_modules() if isinstance(module, TensorTrainModule)}
    report = size_report(model)
    return RankReport(
        before={name: tuple(history.ranks_before.get(name, module.ranks)) for name, module in trains.items()},
        after={name: module.ranks for name, module in trains.items()},
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
