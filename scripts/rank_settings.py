"""The settings of rank adaptation that every training script has, and what they become."""

import math
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from hf_comera import RankAdaptation, RankAdapter, size_report
from loop_settings import setting

_WANTED = ("target_ratio", "target_parameters", "target_core_ratio")


@dataclass(kw_only=True)
class RankSettings:
    """Whether and how ranks are trained; part of the settings of the training."""

    adapt_ranks: bool = setting(
        False, "Train the ranks with the task and cut dead ones. One of the three targets below implies it."
    )
    target_ratio: float | None = setting(
        None, "Wanted size: parameters of the model over those of the dense model, e.g. 0.02. It is met exactly."
    )
    target_parameters: int | None = setting(None, "The same as a number of parameters, e.g. 1500000.")
    target_core_ratio: float | None = setting(
        None, "The same as core parameters over those the model starts with, e.g. 0.5."
    )
    early_stage: float = setting(
        0.4, "Length of the early stage, before the first cut for size: a part of the training, or steps if above 1."
    )
    late_stage: float = setting(
        0.3, "Length of the late stage, in which the size falls to the wanted one; likewise. Ranks then stay."
    )


def wants_adaptation(settings: RankSettings) -> bool:
    """Whether ranks are to be trained."""
    return settings.adapt_ranks or any(getattr(settings, name) is not None for name in _WANTED)


def check_ranks(settings: RankSettings, dense: bool) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        ValueError: If more than one target is given, one is out of range, stages are given without anything to train,
            or the model is dense.
    """
    targets = [f"--{name} {getattr(settings, name)}" for name in _WANTED if getattr(settings, name) is not None]
    if len(targets) > 1:
        raise ValueError(f"{' and '.join(targets)} are given. Give the one that you know.")
    if dense and wants_adaptation(settings):
        raise ValueError(f"{_asked_by(settings)} is for tensor trains, which --dense has none of. Give one.")
    ratio = settings.target_core_ratio
    if ratio is not None and not 0 < ratio <= 1:
        raise ValueError(f"--target_core_ratio {ratio} must be above 0 and at most 1, for example 0.5.")
    for name in ("early_stage", "late_stage"):
        _check_stage(name, settings)
    _settings(settings, settings.target_parameters)


def _check_stage(name: str, settings: RankSettings) -> None:
    length = getattr(settings, name)
    if not (0 <= length <= 1 or (math.isfinite(length) and length > 1 and length == int(length))):
        raise ValueError(
            f"--{name} {length:g} is neither a part of the training (0 to 1, for example 0.3) nor a whole number "
            "of steps (above 1, for example 1000)."
        )
    if length != getattr(RankSettings, name) and not wants_adaptation(settings):
        raise ValueError(
            f"--{name} {length:g} is of rank adaptation, which nothing asks for. Give --adapt_ranks with it, or a "
            "wanted size, for example --target_ratio 0.02."
        )


def _asked_by(settings: RankSettings) -> str:
    """The option that asks for rank adaptation, as it is typed."""
    targets = [f"--{name} {getattr(settings, name)}" for name in _WANTED if getattr(settings, name) is not None]
    return targets[0] if targets else "--adapt_ranks"


def rank_adaptation(settings: RankSettings, model: nn.Module) -> RankAdaptation | None:
    """What :class:`RankAdapter` needs to know, for a compressed ``model`` as it starts; None if ranks stay."""
    if not wants_adaptation(settings):
        return None
    parameters = settings.target_parameters
    if settings.target_core_ratio is not None:
        sizes = size_report(model)
        others = sizes.parameters - sizes.compressed_parameters
        parameters = others + int(settings.target_core_ratio * sizes.compressed_parameters)
    return _settings(settings, parameters)


def _settings(settings: RankSettings, parameters: int | None) -> RankAdaptation:
    return RankAdaptation(
        target_ratio=settings.target_ratio, target_parameters=parameters,
        early=_steps(settings.early_stage), late=_steps(settings.late_stage),
    )  # fmt: skip


def _steps(length: float) -> int | float:
    return int(length) if length > 1 else length


def make_adapter(
    settings: RankSettings, model: nn.Module, optimizer: Optimizer, adaptation: RankAdaptation, total_steps: int
) -> RankAdapter:
    """What trains the ranks of ``model``.

    Raises:
        ValueError: If it cannot, for example since the size is impossible; the message begins with the option given.
    """
    try:
        return RankAdapter(model, optimizer, adaptation, total_steps=total_steps)
    except ValueError as problem:
        raise ValueError(f"{_asked_by(settings)}: {problem}") from problem


def describe_ranks(settings: RankSettings) -> str:
    """How ranks are trained, in a few words for tables; empty if they stay as they are."""
    if not wants_adaptation(settings):
        return ""
    wanted = [f"{name}={getattr(settings, name)}" for name in _WANTED if getattr(settings, name) is not None]
    stages = f"early {settings.early_stage:g}, late {settings.late_stage:g}"
    return f"{wanted[0] if wanted else 'no wanted size'} ({stages})"
