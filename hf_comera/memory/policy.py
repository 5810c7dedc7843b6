"""What becomes of the tensors that autograd keeps for backward: the choices, and the policies that have a name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["NAMED_POLICIES", "ActivationPolicy", "as_policy"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "products": ("rebuild", "keep"),
    "functions": ("rebuild", "keep"),
    "norms": ("rebuild", "keep"),
    "sums": ("rebuild", "keep"),
    "attention": ("recompute", "scores", "keep"),
    "dropout": ("bits", "keep"),
    "rest": ("keep", "fp8"),
}


@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """Choices for each kind of tensor that autograd wants to keep from forward to backward.

    Args:
        products: ``"rebuild"`` what a thin product gives from its code: the outputs of tensor trains (query, key,
            value, the FFN before its activation) and of LoRA's second factor. A product is thin if its inner size is
            less than a quarter of its output's.
        functions: ``"rebuild"`` what entry-by-entry functions, gated products, casts and softmax give, from what they
            took in.
        norms: ``"rebuild"`` what layer and RMS norms give.
        sums: ``"rebuild"`` residual sums.
        attention: ``"scores"``: core attention is computed again where its scores would be stored (the eager form, and
            SDPA without a fused kernel, as with dropout on a CPU). ``"recompute"``: its output too, in all forms.
        dropout: ``"bits"`` keeps one bit an entry of each mask.
        rest: What cannot or shall not be rebuilt: ``"keep"`` it, or store it in ``"fp8"``.
        depth: Longest chain of tensors that are rebuilt one from another; the next one is kept. Deeper keeps less
            from forward to backward, and needs more of it at once in backward.
        min_bytes: Smaller tensors are kept as they are.

    Raises:
        ValueError: If a choice is unknown, or a number is out of range.

    Source:
        Selective recomputation: Korthikanti et al., arXiv:2205.05198. FP8 activations: COAT, arXiv:2410.19313.
        Rebuilding from codes is ours.
    """

    products: str = "rebuild"
    functions: str = "rebuild"
    norms: str = "rebuild"
    sums: str = "rebuild"
    attention: str = "scores"
    dropout: str = "bits"
    rest: str = "keep"
    depth: int = 6
    min_bytes: int = 65536

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                allowed = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={getattr(self, name)!r} of ActivationPolicy must be one of {allowed}.")
        for name in ("depth", "min_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                default = next(field.default for field in fields(self) if field.name == name)
                raise ValueError(f"{name}={value!r} of ActivationPolicy must be an integer >= 0, such as {default}.")

    def rebuilds(self, kind: str) -> bool:
        """Whether tensors of this kind, a name of ``call_kinds``, are computed again in backward."""
        if kind == "attention":
            return self.attention == "recompute"
        if kind == "scores":
            return self.attention != "keep"
        return kind == "dropout" or getattr(self, kind) == "rebuild"


_NOTHING: dict[str, Any] = dict.fromkeys(("products", "functions", "norms", "sums", "attention"), "keep")

NAMED_POLICIES = {
    "keep": ActivationPolicy(**_NOTHING, dropout="keep"),
    "rank": ActivationPolicy(),
    "rank+fp8": ActivationPolicy(rest="fp8"),
    "fp8": ActivationPolicy(**_NOTHING, rest="fp8"),
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
