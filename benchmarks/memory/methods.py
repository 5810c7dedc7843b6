"""Part ``methods`` of the memory benchmark: all that a whole training step at batch 1 has in memory, by method."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.memory.candidates import Candidate, measure_apart, why_absent
from benchmarks.memory.promises import GALORE_FACTOR, beside_bar
from loop.measure import DENSE, TENSOR_TRAIN

Row = dict[str, str | int | float]
METHODS = (
    (DENSE, "adamw", "keep"),
    (DENSE, "galore", "keep"),
    (DENSE, "galore, embedding too", "keep"),
    (DENSE, "adamw8bit", "keep"),
    (TENSOR_TRAIN, "tt_muon", "keep"),
    (TENSOR_TRAIN, "coat_adamw", "rank+fp8"),
)
"""Form, optimizer, policy; ours last."""
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "memory_methods.png"
MODELS = {"full": "bert-6x768", "tiny": "bert-tiny"}
KINDS = ("weights", "gradients", "optimizer", "activations")


def measure_methods(sizes: str, device: str, threads: int, console: Console) -> list[Row]:
    """A row for each method whose package is installed; says which are not."""
    candidates = []
    for form, optimizer, policy in METHODS:
        reason = why_absent(optimizer)
        if reason:
            console.print(f"No row for {form}, {optimizer}: {reason}", markup=False)
            continue
        shared = {"model": MODELS[sizes], "sequences": 1}
        candidates.append(Candidate(form=form, policy=policy, optimizer=optimizer, **shared))
    rows = []
    for candidate in tqdm(candidates, desc="memory, by method", unit="process", leave=False):
        memory = measure_apart(candidate, device, threads)
        columns = {f"{kind}_bytes": num_bytes for kind, num_bytes in memory.parts.items()}
        peak = "" if memory.peak is None else memory.peak
        total = {"sum_bytes": sum(memory.parts.values()), "peak_bytes": peak, "peak_by": memory.measured_by}
        rows.append(candidate.case() | columns | total)
    return rows


def show_methods(rows: Sequence[Mapping[str, str | int | float]], console: Console) -> None:
    """Print the figures, and how many times more than the last method each takes."""
    title = f"A whole training step of {rows[0]['model']}, {rows[0]['tokens']} tokens"
    table = Table("form", "optimizer", "policy", title=title, title_justify="left")
    for heading in ("weights", "gradients", "optimizer", "activations", "sum MB", "peak MB"):
        table.add_column(heading, justify="right")
    for column in ("sum", "peak"):
        table.add_column(f"{column}, times ours", justify="right")
    for row in rows:
        names = ("weights", "gradients", "optimizer", "activations", "sum", "peak")
        sizes = [row[f"{name}_bytes"] for name in names]
        shown = ["-" if size == "" else f"{size / 1e6:,.2f}" for size in sizes]
        table.add_row(row["form"], row["optimizer"], row["policy"], *shown, *_factors(row, rows[-1]))
    console.print(table)
    console.print(
        "sum: of the tensors. peak: weights, optimizer state and the most that a step adds to what was in memory "
        "before it, after one step that is not counted; gradients and activations are not all there at one time, but "
        "intermediate results are (on a CPU, bitsandbytes decodes states whole). All methods update after the whole "
        "backward, GaLore too, which could do so layer by layer."
    )


def _factors(row: Mapping[str, str | int | float], ours: Mapping[str, str | int | float]) -> list[str]:
    """How many times ours ``row`` takes, by the sum and by the peak."""
    is_promised = row["optimizer"].startswith("galore") and row["model"] == MODELS["full"]
    bar, cells = GALORE_FACTOR if is_promised else None, []
    for column in ("sum_bytes", "peak_bytes"):
        if "" in (row[column], ours[column]):
            cells.append("-")
        else:
            factor = row[column] / ours[column]
            cells.append(beside_bar(bar, factor, f"{factor:.1f}"))
    return cells


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
