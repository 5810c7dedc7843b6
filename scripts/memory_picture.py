"""Draws part ``methods`` of the memory benchmark: a bar a method, stacked by what lies in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "memory_methods.png"
KINDS = ("weights", "gradients", "optimizer", "activations")


def draw_methods(rows: Sequence[Mapping[str, str | int | float]], path: Path) -> bool:
    """Write the picture.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.6 * len(rows) + 1.6), layout="constrained")
    labels = [f"{row['form']}\n{row['optimizer']}, {row['policy']}" for row in rows]
    left = [0.0] * len(rows)
    for kind in KINDS:
        widths = [row[f"{kind}_bytes"] / 1e6 for row in rows]
        axes.barh(labels, widths, left=left, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    peaks = [(row["peak_bytes"] / 1e6, label) for row, label in zip(rows, labels, strict=True) if row["peak_bytes"]]
    if peaks:
        axes.plot(*zip(*peaks, strict=True), "k|", markersize=18, label="measured peak")
    for row, label, end in zip(rows, labels, left, strict=True):
        peak = (row["peak_bytes"] or 0) / 1e6
        words = f"{end:,.0f} MB" + (f", peak {peak:,.0f}" if peak else "")
        axes.annotate(words, (max(end, peak), label), (6, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.35)  # room for the figures beside the bars
    axes.set(xlabel="MB", title=f"One training step of {rows[0]['model']}, {rows[0]['tokens']} tokens")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
