"""``RankAdaptation``: the settings of rank-adaptive training, checked and explained in one place."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

__all__ = ["RankAdaptation", "Stages", "check_adaptation", "resolve_steps"]


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
        """Whether ranks are pruned once ``steps`` steps are done: at intervals, and at the end of the last stage."""
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


@dataclass(frozen=True, kw_only=True)
class RankAdaptation:
    """How ranks are trained with the task; the defaults work without tuning.

    Training has up to three parts. In the *early stage* a light pressure on the rank gates sorts the ranks. In the
    *late stage*, if a size is wanted, the least important ranks are pruned at intervals on the way to it. For the rest
    of the training the ranks stay as they are.

    Raises:
        ValueError: If a setting is out of range, or both targets are given.

    Source:
        CoMERA, arXiv:2405.14377; docs/ranks.md says where and why this differs.
    """

    target_ratio: float | None = None
    """Wanted parameters of the whole model over those of the dense model, for example 0.02. None: no wanted size."""

    target_parameters: int | None = None
    """Wanted parameters of the whole model, instead of ``target_ratio``."""

    early: int | float = 0.4
    """Length of the early stage: steps (an integer) or a part of the training (a float)."""

    late: int | float = 0.3
    """Length of the late stage, likewise; without a wanted size the early stage lasts as long as both."""

    cut_every: int | float = 0.02
    """Steps between two prunings, or a part of the training."""

    gamma: float = 0.05
    """Pressure on the gates in the early stage. At first an average gate falls by ``gamma`` times its learning rate a
    step; later singular values do, over the largest of their bond."""

    beta: float = 0.0
    """Weight of the cores' squared norm: cores shrink by ``beta`` times the gates' learning rate a step."""

    pressure: float = 0.1
    """The same in the late stage, times ``1 + rho`` while the size (against the present budget) is the worse
    objective, and times ``rho`` while the loss is."""

    rho: float = 0.1
    """Weight of the objective that is not the worse one."""

    wanted_loss: float | None = None
    """L0 of the late stage. None: the smoothed training loss at the end of the early stage."""

    threshold: float = 0.01
    """Ranks are dead, and pruned, if their singular values are together, as a norm, below this part of the largest at
    their bond, the weakest first. CoMERA's tau, there for each entry alone."""

    min_rank: int = 1
    """Ranks of a linear layer that pruning for size leaves on every bond; 0: whole layers may go. Of an embedding it
    leaves at least one."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model; numbers of other packages become Python's, which JSON holds."""
        for name, value in vars(self).items():
            if isinstance(value, Real) and not isinstance(value, bool | int | float):
                object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))
        if self.target_ratio is not None and self.target_parameters is not None:
            raise ValueError(
                f"target_ratio={self.target_ratio} and target_parameters={self.target_parameters} are both given. "
                "Give the one that you know, and leave the other None."
            )
        if self.target_ratio is not None and not (_is_number(self.target_ratio) and 0 < self.target_ratio <= 1):
            raise ValueError(
                f"target_ratio={self.target_ratio!r} is the wanted part of the dense parameters and must be above 0 "
                "and at most 1, for example target_ratio=0.02 for 50 times fewer."
            )
        if self.target_parameters is not None:
            _check_integer("target_parameters", self.target_parameters, least=1, example=1_500_000)
        _check_integer("min_rank", self.min_rank, least=0, example=0)
        if not (_is_number(self.threshold) and 0 <= self.threshold < 1):
            raise ValueError(
                f"threshold={self.threshold!r} must be a number of at least 0 and below 1, for example 0.01."
            )
        if self.wanted_loss is not None and not (_is_number(self.wanted_loss) and self.wanted_loss != 0):
            raise ValueError(
                f"wanted_loss={self.wanted_loss!r} must be a finite number other than zero, since losses are compared "
                "relative to it. Give a loss, for example 0.8, or None for the loss at the end of the early stage."
            )
        for name in ("gamma", "beta", "pressure", "rho"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise ValueError(f"{name}={value!r} must be a finite number of at least 0, for example {name}=0.1.")
        for name in ("early", "late", "cut_every"):
            resolve_steps(name, getattr(self, name), 2**62)

    @property
    def has_target(self) -> bool:
        """Whether a size is wanted."""
        return self.target_ratio is not None or self.target_parameters is not None

    def stages(self, total_steps: int) -> Stages:
        """The stages of a training of ``total_steps`` steps.

        Raises:
            ValueError: If the stages are longer than the training.
        """
        _check_integer("total_steps", total_steps, least=1, example=1000)
        total_steps = int(total_steps)
        early, late = (resolve_steps(name, getattr(self, name), total_steps) for name in ("early", "late"))
        if self.has_target and isinstance(self.late, float) and self.late > 0:
            late = max(late, 1)  # of a training of one or two steps
        if isinstance(self.early, float) and isinstance(self.late, float) and self.early + self.late < 1 + 1e-9:
            early = min(early, total_steps - late)  # both may have been rounded up
        if early + late > total_steps:
            raise ValueError(
                f"early={self.early} and late={self.late} are {early} and {late} steps, together longer than the "
                f"training, which has {total_steps}. Use for example early=0.4, late=0.3."
            )
        if self.has_target and late == 0:
            raise ValueError(f"late={self.late} leaves no step to reach the wanted size in. Use for example late=0.3.")
        cut_every = max(1, resolve_steps("cut_every", self.cut_every, total_steps))
        if not self.has_target:
            early, late = early + late, 0
        return Stages(total=total_steps, early=early, late=late, cut_every=cut_every)


def check_adaptation(rank_adaptation: object) -> RankAdaptation:
    """The settings, if that is what they are.

    Raises:
        ValueError: If they are something else, such as a bare ratio.
    """
    if not isinstance(rank_adaptation, RankAdaptation):
        raise ValueError(
            f"rank_adaptation={rank_adaptation!r} is needed as a RankAdaptation, for example "
            "RankAdaptation(target_ratio=0.02)."
        )
    return rank_adaptation


def _check_integer(name: str, value: int, *, least: int, example: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r} is not an integer of at least {least}. Use for example {name}={example}.")


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is no float
        return False
