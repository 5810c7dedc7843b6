"""Draw the picture of the README, docs/pictures/speed.png, from the row of one training step in benchmarks/results/.

    python -m benchmarks.speed.picture
    python -m benchmarks.speed.picture --check

The step is that of the sentence above the picture (readme_table.py): parameters, seconds and bytes, dense beside
tensor train, on one machine. The figures also stand in the file as text, with which --check compares the row.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from benchmarks.harness.timing import RESULTS
from benchmarks.speed.readme_table import FORMS, ROOT, STEP, Row, read_results, shown_row

PICTURE = ROOT / "docs" / "pictures" / "speed.png"
COLORS = {"dense": "#9aa0a6", "tensor_train": "#0b7285"}
# Title of a panel, end of the column's name, what divides the number, and how it is written.
PANELS = (
    ("parameters", "parameters", 1e6, "{:,.1f} M"),
    ("one training step", "s", 1, "{:.1f} s"),
    ("peak memory of the step", "peak_bytes", 1e6, "{:,.0f} MB"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw, or compare picture and row."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the picture is not up to date")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="default: docs/pictures/speed.png")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the csv files; default: %(default)s")
    args = parser.parse_args(argv)
    step = shown_row(read_results(args.results), STEP)
    if step is None:
        parser.error(
            f"{args.results} has no row of {STEP!r}. Run: python -m benchmarks.speed.step --rounds 5 --dropout 0"
        )
    if not args.check:
        draw(step.row, args.picture)
    elif not args.picture.exists() or told(args.picture) != description(step.row):
        sys.exit(f"{args.picture} is not of the rows of {args.results}. Run: python -m benchmarks.speed.picture")


def description(row: Row) -> str:
    """All figures of the picture in words."""
    panels = (f"{title}: {', '.join(_labels(row, column, unit, form))}" for title, column, unit, form in PANELS)
    return f"dense, tensor train; {'; '.join(panels)}; {row['processor']}, {row['threads']} threads"


def told(picture: Path) -> str:
    """The words that stand in the file; empty without any."""
    with Image.open(picture) as image:
        return str(image.info.get("Description", ""))


def draw(row: Row, picture: Path) -> None:
    """Two bars a panel, with their figures beside them instead of axes."""
    figure = Figure(figsize=(10, 1.9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for axes, (title, column, unit, form) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        values = [float(row[f"{side}_{column}"]) / unit for side in FORMS]
        axes.barh([0, 1], values, color=[COLORS[side] for side in FORMS], height=0.62)
        for position, (value, label) in enumerate(zip(values, _labels(row, column, unit, form), strict=True)):
            axes.annotate(label, (value, position), (6, 0), textcoords="offset points", va="center", fontsize=12)
        axes.set(xlim=(0, 1.45 * max(values)), ylim=(1.5, -0.5), xticks=[], yticks=[0, 1], yticklabels=[])
        axes.set_title(title, fontsize=12, loc="left", fontweight="bold")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        if column == PANELS[0][1]:
            axes.set_yticklabels([side.replace("_", " ") for side in FORMS], fontsize=12)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=160, metadata={"Description": description(row)})


def _labels(row: Row, column: str, unit: float, form: str) -> list[str]:
    return [form.format(float(row[f"{side}_{column}"]) / unit) for side in FORMS]


if __name__ == "__main__":
    main()
