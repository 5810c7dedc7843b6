"""What became of the ranks: tables in the terminal and a picture in the output folder."""

import statistics

from rich.console import Console
from rich.table import Table

from train_loop import Run
from training_size import bytes_by_kind

PART = 10
"""First and last steps are compared by this part of all."""
BYTES = {
    "weights": ("weights",),
    "weights, gradients, optimizer state": ("weights", "gradients", "optimizer"),
    "checkpoint of the training": ("weights", "optimizer"),
}


def show_ranks(run: Run, console: Console) -> None:
    """Print ranks, time and memory before and after, and draw the ranks with the size over the steps.

    Nothing if ranks were not trained.
    """
    if run.adapter is None:
        return
    report = run.accelerator.unwrap_model(run.model).rank_report()
    console.print(report)
    console.print(_savings(run))
    try:
        report.plot(run.folder / "ranks.png")
    except ImportError as error:
        console.print(f"No picture of the ranks: {error}")


def _savings(run: Run) -> Table:
    """Time and memory of a step, at first and at last."""
    assert run.adapter is not None
    history, sizes = run.history, run.adapter.history.parameters
    part = max(1, run.step // PART)
    seconds = [statistics.median(steps) for steps in (history.step_seconds[:part], history.step_seconds[-part:])]
    for parameter in run.model.parameters():  # as they were when the first figure was taken
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = parameter.detach().new_zeros(parameter.shape)
    last_bytes = bytes_by_kind(run.model, [run.optimizer])._asdict()
    run.optimizer.zero_grad()
    table = Table("", "before", "after", title="What was saved", title_justify="left")
    table.add_row("parameters", *(f"{size:,}" for size in (sizes[0], sizes[-1])))
    for what, kinds in BYTES.items():
        sums = (sum(of_kind[kind] for kind in kinds) for of_kind in (history.first_bytes, last_bytes))
        table.add_row(what, *(f"{num_bytes / 1e6:,.2f} MB" for num_bytes in sums))
    table.add_row("seconds a step (median)", *(f"{value:.4f}" for value in seconds))
    return table
