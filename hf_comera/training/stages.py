"""When what happens: the early stage, the late stage with its falling budget, the steps at which ranks are cut."""

import math
from dataclasses import dataclass

__all__ = ["Stages", "resolve_steps"]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The course of a training of ``total`` steps; after the late stage the ranks stay as they are."""

    total: int
    early: int
    """Steps of the early stage."""
    late: int
    """Steps of the late stage; 0 if there is no wanted size."""
    cut_every: int

    def name(self, step: int) -> str:
        """``"early"``, ``"late"`` or ``"final"``; ``step`` is the number of steps done."""
        if step < self.early:
            return "early"
        return "late" if step < self.early + self.late else "final"

    def cuts_after(self, steps: int) -> bool:
        """Whether ranks are cut once ``steps`` steps are done: at intervals, and at the end of the last stage."""
        end = self.early + self.late
        return 0 < steps <= end and (steps == end or (end - steps) % self.cut_every == 0)

    def budget(self, steps: int, start: int, end: int) -> int:
        """The size allowed once ``steps`` steps are done: from ``start`` down to ``end``, fast at first, then slowly.

        Source:
            The cubic course: Zhu, Gupta, "To prune, or not to prune", arXiv:1710.01878.
        """
        if not self.late:
            return start
        done = min(max((steps - self.early) / self.late, 0.0), 1.0)
        return end + math.floor((start - end) * (1 - done) ** 3)


def resolve_steps(name: str, value: int | float, total: int) -> int:
    """Steps from a number of steps (an integer) or a part of the training (a float up to 1).

    Raises:
        ValueError: If it is negative, or longer than the training.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(
            f"{name}={value!r} is needed as a number of steps (an integer such as 1000) or as a part of the training "
            "(a float such as 0.3)."
        )
    if isinstance(value, float) and value > 1:
        raise ValueError(
            f"{name}={value} is a float and so a part of the training, which is at most 1.0. For {value:g} steps, "
            f"give the integer {name}={int(value)}."
        )
    steps = round(value * total) if isinstance(value, float) else value
    if steps > total:
        raise ValueError(
            f"{name}={value} is longer than the training, which has {total} steps. Use at most {total}, or a part of "
            f"the training such as {name}=0.3."
        )
    return steps
