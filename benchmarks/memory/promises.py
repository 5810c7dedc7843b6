"""What the project promises about memory, to be printed beside the figures that were measured."""

from dataclasses import dataclass

from loop.measure import DENSE, TENSOR_TRAIN

__all__ = ["GALORE_FACTOR", "LOSS_DIFFERENCE", "SAVED_BYTES", "SAVED_SHARE", "STEP_SHARE", "Bar", "beside_bar"]


@dataclass(frozen=True)
class Bar:
    """The largest figure that keeps the promise; or the smallest, where more is better."""

    limit: float
    at_least: bool = False

    def met_by(self, figure: float) -> bool:
        """Whether ``figure`` keeps the promise."""
        return figure >= self.limit if self.at_least else figure <= self.limit


def beside_bar(bar: Bar | None, figure: float, shown: str, unit: float = 1.0) -> str:
    """A cell of a rich table: the figure, the bar, and a colour that says which side it is on.

    Args:
        bar: None where nothing is promised.
        figure: What was measured.
        shown: The same, as it is to be printed.
        unit: What the limit is printed in.

    Returns:
        For example ``"[red]1.50 (missed: at most 1.25)[/red]"``.
    """
    if bar is None:
        return shown
    words = f"{'at least' if bar.at_least else 'at most'} {bar.limit / unit:g}"
    return f"[green]{shown} ({words})[/green]" if bar.met_by(figure) else f"[red]{shown} (missed: {words})[/red]"


_BERT = "bert-6x768"
SAVED_BYTES = {
    (_BERT, TENSOR_TRAIN, "rank", 0.0): Bar(186e6),
    (_BERT, TENSOR_TRAIN, "rank", 0.1): Bar(196e6),
    (_BERT, TENSOR_TRAIN, "rank, attention again", 0.0): Bar(145e6),
    (_BERT, TENSOR_TRAIN, "rank+fp8", 0.0): Bar(62e6),
    (_BERT, TENSOR_TRAIN, "rank+fp8", 0.1): Bar(75e6),
}
"""By model, form, policy and dropout, for 32 x 128 tokens."""
SAVED_SHARE = {(_BERT, DENSE, "fp8"): Bar(0.45)}
"""Of what is kept without a policy."""
STEP_SHARE = {(_BERT, TENSOR_TRAIN, "rank"): Bar(1.25), (_BERT, TENSOR_TRAIN, "rank+fp8"): Bar(1.4)}
"""Time of forward and backward over that without a policy."""
GALORE_FACTOR = Bar(9, at_least=True)
"""Peak memory of GaLore over that of the smallest tensor-train training, at batch 1."""
LOSS_DIFFERENCE = Bar(0.01)
"""Between training with FP8 states and activations and without, relative."""
