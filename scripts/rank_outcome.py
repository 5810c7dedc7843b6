"""What became of the ranks: a table in the terminal and a picture in the output folder."""

from rich.console import Console

from train_loop import Run


def show_ranks(run: Run, console: Console) -> None:
    """Print ranks before and after, and draw them with the size over the steps; nothing if ranks were not trained."""
    if run.adapter is None:
        return
    report = run.accelerator.unwrap_model(run.model).rank_report()
    console.print(report)
    try:
        report.plot(run.folder / "ranks.png")
    except ImportError as error:
        console.print(f"No picture of the ranks: {error}")
