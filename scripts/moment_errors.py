"""How far AdamW's steps move when the moments that they are made of are rounded to FP8, expanded first or not."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_comera.ops.fp8 import decode, encode
from hf_comera.optim.flat_groups import FlatGroups, layout_of

Moments = tuple[Tensor, Tensor]
"""Groups of first and of second moments, both without the bias that they begin with."""

ROUNDINGS: dict[str, tuple[str, str]] = {
    "plain": ("e4m3", "e4m3"),
    "second_expanded": ("e4m3", "expanded"),
    "first_expanded": ("expanded", "e4m3"),
    "both_expanded": ("expanded", "expanded"),
    "plain_e5m2_second": ("e4m3", "e5m2"),
}
"""How the first and the second moment are rounded, under the name of the figure."""

_E5M2_LARGEST, _E5M2_SMALLEST = 57344.0, 2.0**-16


def collect_moments(optimizers: Sequence[Optimizer]) -> list[Moments]:
    """The moments of AdamW in the groups that CoatAdamW would quantise; what it keeps in float32 is left out."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state and layout_of(parameter.shape).is_quantised:
                    found.append(_unbiased(optimizer.state[parameter], group["betas"]))
    return found


def step_error(moments: Sequence[Moments], first: str, second: str, eps: float = 1e-8) -> float:
    """The squared error of ``m / (sqrt(v) + eps)`` over its square, summed over all entries.

    Args:
        moments: As :func:`collect_moments` gives them.
        first: ``"e4m3"``, ``"expanded"`` (to the range of E4M3) or ``"e5m2"``: what ``m`` is rounded to.
        second: The same for ``v``; what is not zero does not become zero.
        eps: AdamW's.
    """
    wrong = whole = 0.0
    for m, v in moments:
        step = m / (v.sqrt() + eps)
        rounded = FORMATS[first](m, False) / (FORMATS[second](v, True).sqrt() + eps)
        wrong += (rounded - step).square().sum().item()
        whole += step.square().sum().item()
    return wrong / whole


def _unbiased(state: dict[str, Tensor], betas: tuple[float, float]) -> Moments:
    layout = layout_of(state["exp_avg"].shape)
    pairs = zip(("exp_avg", "exp_avg_sq"), betas, strict=True)
    m, v = (FlatGroups([layout]).gather([state[key]]) / (1 - beta ** state["step"]) for key, beta in pairs)
    return m[: layout.num_groups], v[: layout.num_groups]  # groups that only fill up loops follow


def _e4m3(groups: Tensor, keep_positive: bool) -> Tensor:
    return decode(*encode(groups, keep_positive=keep_positive, expand=False))


def _expanded(groups: Tensor, keep_positive: bool) -> Tensor:
    return decode(*encode(groups, keep_positive=keep_positive))


def _e5m2(groups: Tensor, keep_positive: bool) -> Tensor:
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(groups.dtype).tiny) / _E5M2_LARGEST
    scaled = groups / scale
    if keep_positive:
        scaled = scaled.clamp_min(_E5M2_SMALLEST) * groups.sign()
    return scaled.to(torch.float8_e5m2).float() * scale


FORMATS: dict[str, Callable[[Tensor, bool], Tensor]] = {"e4m3": _e4m3, "expanded": _expanded, "e5m2": _e5m2}
"""Groups, and whether zero is for zeros only, to what they are rounded to."""
