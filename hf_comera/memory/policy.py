"""What becomes of the tensors that autograd keeps for backward: the choices, and the policies that have a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["NAMED_POLICIES", "ActivationPolicy", "as_policy"]

_REPLACED = {
    **dict.fromkeys(("products", "functions", "norms", "sums", "scores", "depth"), "recompute=True or False"),
    "dropout": "recompute=True or False; masks are always drawn again or kept in bits",
    "rest": "storage='keep' or 'fp8'",
}
"""Settings of former versions, and what to say now."""


@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """What each layer of a model keeps from forward to backward.

    Args:
        recompute: Keep the layer's input, outputs of matrix products, of fused attention and of fused feed-forward
            blocks; compute the rest again in backward: norms, activations, dropout, sums, and what thin latents give.
        attention: ``"keep"`` what fused attention gives, or ``"recompute"`` it too, in a layer that is recomputed.
        storage: ``"fp8"`` stores in FP8 what is large: all activations of a layer that is not recomputed, and the
            input of one that is.
        min_bytes: Smaller tensors are not stored in FP8.

    Raises:
        TypeError: If a setting is unknown or of a former version; the message says what to use.
        ValueError: If a choice is unknown, a number is out of range, or two settings contradict each other.

    Source:
        Selective recomputation: Korthikanti et al., arXiv:2205.05198. FP8 activations: COAT, arXiv:2410.19313.
    """

    recompute: bool = True
    attention: str = "keep"
    storage: str = "keep"
    min_bytes: int = 65536

    def __new__(cls, **settings: Any) -> ActivationPolicy:
        """An instance whose settings are not yet set."""
        for name in settings:
            if name in _REPLACED:
                raise TypeError(
                    f"{name}={settings[name]!r} of ActivationPolicy is no longer a setting. Use {_REPLACED[name]}."
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.recompute, bool):
            raise ValueError(f"recompute={self.recompute!r} of ActivationPolicy must be True or False.")
        for name, choices in (("attention", ("keep", "recompute")), ("storage", ("keep", "fp8"))):
            if getattr(self, name) not in choices:
                allowed = " or ".join(map(repr, choices))
                raise ValueError(f"{name}={getattr(self, name)!r} of ActivationPolicy must be {allowed}.")
        if isinstance(self.min_bytes, bool) or not isinstance(self.min_bytes, int) or self.min_bytes < 0:
            raise ValueError(
                f"min_bytes={self.min_bytes!r} of ActivationPolicy must be an integer >= 0, such as 65536."
            )
        if self.attention == "recompute" and not self.recompute:
            raise ValueError(
                "attention='recompute' of ActivationPolicy needs recompute=True: without it nothing is computed again."
            )


NAMED_POLICIES = {
    "keep": ActivationPolicy(recompute=False),
    "rank": ActivationPolicy(),
    "rank+fp8": ActivationPolicy(attention="recompute", storage="fp8"),
    "fp8": ActivationPolicy(recompute=False, storage="fp8"),
}


def as_policy(policy: str | ActivationPolicy | None) -> ActivationPolicy | None:
    """The policy of that name, or the one that is given.

    Raises:
        ValueError: If there is no policy of that name.
    """
    if policy is None or isinstance(policy, ActivationPolicy):
        return policy
    if not isinstance(policy, str) or policy not in NAMED_POLICIES:
        names = ", ".join(map(repr, NAMED_POLICIES))
        raise ValueError(f"activation policy {policy!r} is unknown. Use one of {names}, or an ActivationPolicy(...).")
    return NAMED_POLICIES[policy]
