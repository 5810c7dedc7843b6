"""How a layer runs under a policy: recomputed by selective checkpointing, its activations in FP8, or both."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from hf_comera.memory.fp8_storage import Fp8Activations, Fp8Input, store_kept
from hf_comera.memory.policy import ActivationPolicy
from hf_comera.ops import kept_bits, tiled_mlp  # noqa: F401  (they register operators)
from hf_comera.ops.selective import is_fused_attention, is_kept_product, recomputed

__all__ = ["LayerPolicy"]


class LayerPolicy:
    """What Transformers calls in place of a layer's forward, as it calls ``torch.utils.checkpoint.checkpoint``."""

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
        """What stores in FP8 what autograd saves, or what checkpointing saves of the input."""
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
