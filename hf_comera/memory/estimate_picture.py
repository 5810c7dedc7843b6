"""The picture of a memory estimate: a bar of parts for each policy, and a mark at the peak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_comera.memory.estimate import MemoryEstimate

__all__ = ["draw"]


def draw(estimate: MemoryEstimate, path: Path) -> Path:
    """Write the picture of ``estimate`` to ``path``.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('MemoryEstimate.plot needs matplotlib: pip install "hf_comera[plots]".') from error
    names = list(estimate.policies)
    figure = Figure(figsize=(8, 0.6 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    parts = {
        "weights": [estimate.weights] * len(names),
        "gradients": [estimate.gradients] * len(names),
        "optimizer": [estimate.optimizer] * len(names),
        "activations": [policy.activations for policy in estimate.policies.values()],
    }
    ends = [0.0] * len(names)
    for label, sizes in parts.items():
        widths = [size / 1e6 for size in sizes]
        axes.barh(names, widths, left=ends, label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    peaks = [policy.peak / 1e6 for policy in estimate.policies.values()]
    axes.plot(peaks, names, "k|", markersize=16, markeredgewidth=2, label="peak")
    axes.invert_yaxis()
    axes.set_xlabel("MB")
    axes.set_title(f"Training step, estimated: {estimate.batch}", fontsize=10)
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    figure.savefig(path, dpi=150)
    return path
