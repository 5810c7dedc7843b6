"""Activation policies: which tensors a layer saves for backward, and the policies that have a name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from hf_comera.memory.fp8_storage import Fp8Activations, Fp8Input, store_kept
from hf_comera.ops import bit_dropout, tiled_mlp  # noqa: F401  (they register operators)
from hf_comera.ops.selective import is_fused_attention, is_kept_product, recomputed

__all__ = ["NAMED_POLICIES", "ActivationPolicy", "LayerPolicy", "as_policy"]

_REPLACED = {
    **dict.fromkeys(("products", "functions", "norms", "sums", "scores", "depth"), "recompute=True or False"),
    "dropout": "recompute=True or False; masks are always drawn again or kept in bits",
    "rest": "storage='keep' or 'fp8'",
}
"""Settings of former versions, and what to say now."""


@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """Which tensors each layer of a model saves from forward to backward.

    Args:
        recompute: Save the layer's input, outputs of matrix products, of fused attention and of fused feed-forward
            blocks. Recompute the rest in backward: norms, activations, dropout, sums, and products of thin latents.
        attention: ``"keep"`` the output of fused attention, or ``"recompute"`` it too, in a layer that is recomputed.
        storage: ``"fp8"`` stores large tensors in FP8: all activations of a layer that is not recomputed, and the
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


class LayerPolicy:
    """Transformers calls it in place of a layer's forward, as it calls ``torch.utils.checkpoint.checkpoint``."""

    def __init__(self, policy: ActivationPolicy) -> None:
        self.policy = policy

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``.

        Args:
            function: ``functools.partial(forward, layer, **kwargs)``.
            args: The layer's positional arguments, its input first.
        """
        # as Transformers does with those that are passed by name: a layer that runs twice would fill one twice
        args = tuple(None if isinstance(item, Cache) else item for item in args)
        if not torch.is_grad_enabled():
            return function(*args)
        in_fp8 = self.policy.storage == "fp8"
        if in_fp8 and torch.compiler.is_compiling():
            _warn_of_compiler()
            in_fp8 = False
        keeps = functools.partial(_keeps, self.policy.attention == "keep")
        with self._hooks(function, args) if in_fp8 else nullcontext():
            if not self.policy.recompute:
                return function(*args)
            store = functools.partial(store_kept, min_bytes=self.policy.min_bytes) if in_fp8 else None
            return recomputed(function, *args, keeps=keeps, after=store)

    def _hooks(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Hooks that store in FP8 the tensors that autograd saves, or the input that checkpointing saves."""
        parts = getattr(function, "args", ()), getattr(function, "keywords", {})
        given = [item for item in tree_leaves((args, parts)) if isinstance(item, Tensor)]
        hidden = next((tensor for tensor in given if tensor.dim() > 1 and tensor.is_floating_point()), None)
        if hidden is None:
            return nullcontext()
        if self.policy.recompute:
            return Fp8Input(hidden, self.policy.min_bytes)
        weights = [weight for item in parts[0] if isinstance(item, nn.Module) for weight in item.parameters()]
        return Fp8Activations(hidden, [*given, *weights], self.policy.min_bytes)


def _keeps(attention: bool, op: Any, args: tuple[Any, ...]) -> bool:
    """Whether a layer that is recomputed keeps what ``op`` gives."""
    return (attention and is_fused_attention(op)) or is_kept_product(op, args) or op in _own_operators()


@functools.cache
def _own_operators() -> frozenset[Any]:
    """Feed-forward blocks between latents, and what dropout keeps, in bits."""
    ours = torch.ops.hf_comera
    return frozenset((ours.tiled_mlp.default, ours.draw_kept.default))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_of_compiler() -> None:
    """Called once a compilation, by the compiler."""
    warnings.warn("FP8 storage of activations has no effect in compiled code.", stacklevel=1)
