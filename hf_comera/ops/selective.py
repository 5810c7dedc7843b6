"""Selective checkpointing: a function whose cheap results are computed again in backward, and the others kept.

Source: selective recomputation: Korthikanti et al., arXiv:2205.05198, section 5. The saved results are chosen as for
``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hf_comera.ops.fused_loss import is_recorded

__all__ = [
    "Keeps",
    "Kept",
    "draws_numbers",
    "is_fused_attention",
    "is_kept_product",
    "outside_of_selection",
    "recomputed",
]

Keeps = Callable[[Any, tuple[Any, ...]], bool]
"""Whether what an operator gives, called with these arguments, is kept."""

aten = torch.ops.aten

_ATTENTIONS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}

_PRODUCTS = {aten.mm.default, aten.addmm.default}

_CHEAP = 4
"""A product whose inner size is this many times smaller than its rows are wide is cheap to recompute.

It is a product with a right half; a dense feed-forward layer widens four times at most.
"""


def recomputed(
    function: Callable[..., Any], *args: Any, keeps: Keeps, after: Callable[[dict[Any, Any]], None] | None = None
) -> Any:
    """``function(*args)``, run again in backward but for what is kept.

    Random numbers are drawn again from the same state, in a step that is recorded they are kept instead.

    Args:
        function: What to compute; twice it must do the same.
        args: Its arguments.
        keeps: What is kept.
        after: Is given what has been kept, once ``function`` has run, and may exchange instances of :class:`Kept`; not
            in compiled code.

    Raises:
        ValueError: If a recorded step draws numbers in a way that they cannot be kept.
    """
    if torch.compiler.is_compiling():  # compilers know torch's own modes
        contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_select, keeps))
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    given = tree_leaves((args, getattr(function, "keywords", None)))
    recorded = any(isinstance(item, Tensor) and is_recorded(item) for item in given)
    selection = _Selection(keeps, recorded)
    # a recorded pass cannot set generators back, and tensors without entries have none to set
    preserve = not recorded and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    with _without_autocast_cache():
        result = checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=lambda: (selection, selection),
            preserve_rng_state=preserve,
        )
    if after is not None:
        after(selection.kept)
    return result


class Kept:
    """A tensor that is kept."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> Tensor:
        """It, without a graph.

        Raises:
            RuntimeError: If it has been written to.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"A tensor of shape {tuple(self._tensor.shape)} that was kept for backward was modified in place. "
                "Layers that write to the results of products and attention cannot be recomputed; use the policy "
                "'keep' for them."
            )
        return _alias(self._tensor)


class _Selection(TorchDispatchMode):
    """Runs what is kept once, and gives it again each time that all is computed again.

    torch's own modes allow one backward only.
    """

    def __init__(self, keeps: Keeps, recorded: bool) -> None:
        super().__init__()
        self._keeps, self._recorded = keeps, recorded
        self._counts: Counter[Any] = Counter()
        self.kept: dict[tuple[Any, int], Any] = {}
        """Results by operator and number of the call, :class:`Kept` in the place of tensors."""

    def __enter__(self) -> "_Selection":
        self._counts.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        key = func, self._counts[func]
        self._counts[func] += 1
        if key in self.kept:
            return tree_map_only(Kept, lambda kept: kept.tensor(), self.kept[key])
        result = func(*args, **kwargs)
        self.kept[key] = tree_map_only(Tensor, lambda tensor: Kept(_alias(tensor)), result)
        return result

    def _is_kept(self, func: Any, args: Any, kwargs: Any) -> bool:
        if not draws_numbers(func, args, kwargs):
            return self._keeps(func, args)
        if self._recorded and func._schema.is_mutable:
            raise ValueError(
                f"{func} writes random numbers into a tensor, which cannot be computed again in a recorded step. Use "
                "the policy 'keep', set dropout to 0, or do without the graph."
            )
        # all draws are made again from the same state, or none: one that is left out would shift the others
        return self._recorded


def _alias(tensor: Tensor) -> Tensor:
    """A view that autograd may make part of a graph, and that counts edits together with ``tensor``."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _select(keeps: Keeps, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = not draws_numbers(op, args, kwargs) and keeps(op, args)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def is_fused_attention(op: Any) -> bool:
    """Whether ``op`` is core attention whose scores are never whole in memory: torch's, or ours with dropout."""
    # looked up late: operators of ours are registered when their file is imported
    ours = getattr(torch.ops.hf_comera, "dropped_attention", None)
    return op in _ATTENTIONS or (ours is not None and op is ours.default)


def is_kept_product(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether ``op`` is a matrix product, and not one that takes rows from a narrow latent to a wide tensor."""
    if op not in _PRODUCTS:
        return False
    inner, width = args[-1].shape
    return bool(_CHEAP * inner >= width)


@contextmanager
def outside_of_selection() -> Iterator[None]:
    """Within, selective checkpointing around it sees no operation, so what is done may be left out the second time.

    It counts operations of a kind, to find in backward what it has kept. Things that are made once and kept, such as
    halves, are not made again there.
    """
    modes = []
    while isinstance(_get_current_dispatch_mode(), _Selection):
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def draws_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call takes numbers from a generator; attention without dropout takes none."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Casts of weights are made every time: one that was made before would be missing in backward."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
