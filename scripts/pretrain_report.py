"""What a finished run was measured to be, as a summary table and functions with filled masks for the eye."""

import dataclasses

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from filled_masks import FilledMask
from hf_comera import SizeReport
from speed_comparison import SpeedComparison
from train_loop import History


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that was measured in one run."""

    dense: bool
    sizes: SizeReport
    checkpoint_bytes: int
    reload_is_bit_equal: bool
    history: History
    unigram_loss: float
    num_targets: int
    """Hidden tokens the held-out losses are means of."""
    speed: SpeedComparison | None
    filled: list[FilledMask]
    training_data: str

    @property
    def train_loss(self) -> float:
        """Mean over the last steps, at most 50."""
        recent = self.history.losses[-50:]
        return sum(recent) / len(recent)

    @property
    def held_out_loss(self) -> float:
        """The last held-out loss."""
        return self.history.held_out[-1][1]


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print the tables, then the functions with their filled masks."""
    for table in (_size_table(outcome), _loss_table(outcome)):
        console.print(table)
        console.print()
    for number, filled in enumerate(outcome.filled, start=1):
        console.print(f"[bold]Held-out function {number}[/bold] [dim]{escape(_first_line(filled.docstring))}[/dim]")
        console.print(escape(filled.code), highlight=False)
        guesses = ", ".join(f"{guess.strip()!r} {probability:.1%}" for guess, probability in filled.guesses)
        console.print(
            f"[bold]hidden:[/bold] {escape(filled.name)}  [bold]guesses:[/bold] {escape(guesses)}\n", highlight=False
        )


def _size_table(outcome: Outcome) -> Table:
    sizes, speed = outcome.sizes, outcome.speed
    rows = [
        ("parameters", sizes.dense_parameters, sizes.parameters),
        ("parameters of the tensor-train layers", sizes.compressed_dense_parameters, sizes.compressed_parameters),
        ("bytes of the parameters", sizes.dense_bytes, sizes.bytes),
    ]
    if outcome.dense:
        table = _table("Size", "dense")
        for what, dense, _ in (rows[0], rows[2]):
            table.add_row(what, f"{dense:,}")
        table.add_row("bytes of the checkpoint on disk", f"{outcome.checkpoint_bytes:,}")
        return table
    table = _table("Size and speed", "dense twin", "tensor train", "")
    for what, dense, ours in rows:
        table.add_row(what, f"{dense:,}", f"{ours:,}", f"{dense / ours:.1f}x smaller")
    table.add_row("bytes of the checkpoint on disk", "", f"{outcome.checkpoint_bytes:,}", "")
    if speed:
        faster = f"{speed.ratio:.2f}x as fast"
        rates = f"{speed.dense_tokens_per_s:,.0f}", f"{speed.compressed_tokens_per_s:,.0f}"
        table.add_row(f"training tokens/s, median of {speed.num_steps} steps each in turns", *rates, faster)
    return table


def _loss_table(outcome: Outcome) -> Table:
    history = outcome.history
    table = _table("Loss of hidden tokens (nats)", "")
    table.add_row(f"training, mean of the last {min(50, len(history.losses))} steps", f"{outcome.train_loss:.3f}")
    table.add_row(f"held-out, {outcome.num_targets:,} hidden tokens", f"[bold]{outcome.held_out_loss:.3f}[/bold]")
    table.add_row("held-out, unigram model on the same tokens", f"{outcome.unigram_loss:.3f}")
    table.add_section()
    table.add_row("steps", f"{len(history.losses):,}")
    table.add_row("training tokens", f"{history.num_tokens:,}")
    table.add_row("training tokens/s over the whole run", f"{history.tokens_per_s:,.0f}")
    table.add_row(
        "logits of the reloaded checkpoint", "bit-equal" if outcome.reload_is_bit_equal else "[red]differ[/red]"
    )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _first_line(docstring: str) -> str:
    return next((line.strip() for line in docstring.splitlines() if line.strip()), "")
