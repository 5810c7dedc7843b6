"""Draw the results of the quality benchmark: loss over steps, seconds and training bytes, and the sweep of the rates.

    python -m benchmarks.quality.pictures
    python -m benchmarks.quality.pictures --only width=256 budget=steps steps=250,1000,1354,3385

Writes docs/pictures/quality_steps.png, quality_seconds.png, quality_bytes.png and quality_rates.png: one panel a task,
one line a model and update, means over the seeds. All but the last show each at its best rate.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.harness.timing import RESULTS
from benchmarks.quality.results import ROWS, Results, Row, Variant, mean_and_spread, variants
from benchmarks.quality.settings import TASKS
from loop.launch import run_script

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
Curves = dict[str, list[Row]]
LOSS = "held-out loss (nats)"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw all four pictures.

    Returns:
        0, or 1 where matplotlib is not installed.

    Raises:
        ValueError: If there is nothing to draw.
    """
    arguments = _parse(argv)
    console = Console(soft_wrap=True)
    try:
        import matplotlib
    except ImportError:
        console.print('No pictures: matplotlib is not installed. pip install "hf_comera[plots]"', markup=False)
        return 1
    matplotlib.use("Agg")
    results = Results(Path(arguments.results_dir))
    by_task = {task: variants(chosen_rows(results, task, arguments.only)) for task in TASKS}
    by_task = {task: found for task, found in by_task.items() if found}
    if not by_task:
        wanted = f" with {' '.join(arguments.only)}" if arguments.only else ""
        raise ValueError(
            f"{results.folder / ROWS} has no row{wanted}. Run python -m benchmarks.quality.run first, or leave --only "
            "out."
        )
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    curves = results.curves()
    for name, draw in panels(curves).items():
        path = Path(arguments.folder) / f"quality_{name}.png"
        draw_picture(path, by_task, draw)
        console.print(f"Drawn: {path}")
    return 0


def chosen_rows(results: Results, task: str, only: Sequence[str]) -> list[Row]:
    """The rows of ``task`` that agree with all ``column=value`` or ``column=value,other``.

    Raises:
        ValueError: If there is no such column.
    """
    rows = results.rows(task)
    for condition in only:
        column, _, value = condition.partition("=")
        if rows and column not in rows[0]:
            raise ValueError(f"--only {condition}: no such column. Use one of {', '.join(rows[0])}; e.g. width=256.")
        rows = [row for row in rows if row[column] in value.split(",")]
    return rows


def panels(curves: Curves) -> dict[str, Callable[["Axes", Variant], None]]:
    """By the name of the picture, what draws one variant into a panel."""
    return {
        "steps": lambda axes, variant: _draw_curve(axes, variant, curves, "step"),
        "seconds": lambda axes, variant: _draw_curve(axes, variant, curves, "seconds"),
        "bytes": _draw_bytes,
        "rates": _draw_rates,
    }


def draw_picture(path: Path, by_task: dict[str, list[Variant]], draw: Callable[["Axes", Variant], None]) -> None:
    """One panel a task, side by side; a variant has the same colour in all of them."""
    from matplotlib import pyplot

    palette = pyplot.get_cmap("tab20").colors
    labels = sorted({variant.label for found in by_task.values() for variant in found})
    figure, row = pyplot.subplots(
        1, len(by_task), figsize=(6 * len(by_task), 5.5), squeeze=False, layout="constrained"
    )
    for axes, (task, found) in zip(row[0], by_task.items(), strict=True):
        for variant in found:
            axes.set_prop_cycle(color=[palette[labels.index(variant.label) % len(palette)]])
            draw(axes, variant)
        axes.set(title=f"task {task}", ylabel=LOSS)
        axes.ticklabel_format(axis="y", useOffset=False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def mean_curve(rows: Sequence[Row], curves: Curves, x_column: str) -> list[tuple[float, float]]:
    """Points ``(x, held-out loss)``, each a mean over the runs of ``rows``; where all of them have one."""
    points: dict[str, list[Row]] = {}
    for row in rows:
        for point in curves.get(row["run"], []):
            if point["held_out_loss"]:
                points.setdefault(point["point"], []).append(point)
    complete = [same for same in points.values() if len(same) == len(rows)]
    return [(mean_and_spread(same, x_column)[0], mean_and_spread(same, "held_out_loss")[0]) for same in complete]


def _draw_curve(axes: "Axes", variant: Variant, curves: Curves, x_column: str) -> None:
    points = mean_curve(variant.best, curves, x_column) if variant.best else []
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=_label(variant), **_style(variant))
    axes.set_xlabel({"step": "step", "seconds": "seconds of training"}[x_column])


def _draw_bytes(axes: "Axes", variant: Variant) -> None:
    _by_ratios(axes, "weights, gradients and optimizer state (MB)")
    if variant.best:
        megabytes = mean_and_spread(variant.best, "training_bytes")[0] / 1e6
        _draw_spreads(axes, variant, [(megabytes, *mean_and_spread(variant.best, "held_out_loss"))], _label(variant))


def _draw_rates(axes: "Axes", variant: Variant) -> None:
    _by_ratios(axes, "learning rate")
    points = [(rate, *mean_and_spread(rows, "held_out_loss")) for rate, rows in variant.by_rate.items()]
    points = [point for point in points if math.isfinite(point[1])]  # the others diverged
    if points:
        _draw_spreads(axes, variant, points, variant.label)


def _draw_spreads(axes: "Axes", variant: Variant, points: list[tuple[float, float, float]], label: str) -> None:
    """Points ``(x, loss, spread)``; matplotlib's errorbar makes an axis of no width around a single one."""
    places, losses, _ = zip(*points, strict=True)
    (line,) = axes.plot(places, losses, marker="o", label=label, **_style(variant))
    for place, loss, spread in points:
        axes.plot([place, place], [loss - spread, loss + spread], color=line.get_color())


def _by_ratios(axes: "Axes", label: str) -> None:
    """A logarithmic axis with few plain numbers; set before anything is drawn, so that a single point gets a range."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(xscale="log", xlabel=label)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _label(variant: Variant) -> str:
    return f"{variant.label}, lr {variant.best_rate:g}"


def _style(variant: Variant) -> dict[str, str]:
    return {"linestyle": "--" if variant.label.startswith("dense") else "-"}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.quality.pictures", description=__doc__, formatter_class=keep_lines
    )
    parser.add_argument(
        "--results_dir", default=str(RESULTS), help="folder of the csv files; default benchmarks/results"
    )
    parser.add_argument("--folder", default=str(PICTURES), help="where the pictures go; default docs/pictures")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="COLUMN=VALUE",
        help="draw only the rows with these values; several of one column with commas: steps=250,1000",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_script(main))
