"""The picture of a run: training and held-out loss over the steps, and the unigram model as a line."""

from pathlib import Path

import numpy as np

from pretrain_report import Outcome


def draw_losses(outcome: Outcome, path: Path) -> bool:
    """Draw the losses of the whole run into ``path``.

    Returns:
        False, with nothing drawn, where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = np.array(outcome.history.losses)
    window = max(1, len(losses) // 50)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(np.arange(window, len(losses) + 1), smooth, color="tab:blue", label="training")
    axes.plot(
        *zip(*outcome.history.held_out, strict=True), color="tab:orange", marker="o", markersize=4, label="held-out"
    )
    axes.axhline(outcome.unigram_loss, color="tab:gray", linestyle="--", label="held-out, unigram model")
    form = "dense" if outcome.dense else f"tensor train, {outcome.sizes.ratio:.1f}x fewer parameters"
    axes.set(xlabel="step", ylabel="loss of hidden tokens (nats)", title=f"Masked language model on code, {form}")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
