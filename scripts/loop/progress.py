"""The newest figures of a run beside its progress bar."""

from collections.abc import Mapping

STAGES = ("early", "late", "final")
SHOWN = {
    "loss": ("loss", ".3f"),
    "held_out_loss": ("held-out", ".3f"),
    "accuracy": ("accuracy", ".4f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "live_ranks": ("ranks", ".0f"),
    "parameters": ("parameters", ",.0f"),
    "relaxed_size": ("size", ".3f"),
}
"""Name beside the bar and format, by the name in the logs."""


def beside_bar(figures: Mapping[str, float]) -> dict[str, str]:
    """The figures to show, in few letters; those measured on held-out data may be called ``eval_...``."""
    named = {name.removeprefix("eval_"): value for name, value in figures.items() if name != "eval_loss"}
    if "eval_loss" in figures:
        named.setdefault("held_out_loss", figures["eval_loss"])
    shown = {short: format(named[name], form) for name, (short, form) in SHOWN.items() if name in named}
    return shown | ({"stage": STAGES[int(named["rank_stage"])]} if "rank_stage" in named else {})
