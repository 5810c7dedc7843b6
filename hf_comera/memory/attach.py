"""``set_activation_policy``: put a policy on a model, or take it off."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import nn

from hf_comera.memory.policy import ActivationPolicy, as_policy
from hf_comera.memory.saved_bytes import SavedBytes
from hf_comera.memory.session import Session

__all__ = ["activation_policy", "set_activation_policy"]


def set_activation_policy(model: nn.Module, policy: str | ActivationPolicy | None) -> None:
    """Decide what becomes of the tensors that autograd keeps during ``model(...)``.

    The policy holds from the beginning to the end of the model's forward, loss included where the model computes it.
    It has no effect where no gradient is recorded, in compiled code, and inside of other saved-tensor hooks such as
    those of gradient checkpointing, which then decide; both of the latter are said once.

    Args:
        model: Any module; dense or in tensor-train form. A policy on a part of it holds for that part.
        policy: ``"keep"`` (as without a policy), ``"rank"`` (exact: rebuild what is cheap), ``"rank+fp8"`` (what is
            left in FP8), ``"fp8"`` (all in FP8), or an :class:`ActivationPolicy`.

    Raises:
        ValueError: If there is no policy of that name.
    """
    chosen = as_policy(policy)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Begin | _End)]:
            _remove(model, key)
    if chosen is not None:
        model.register_forward_pre_hook(_Begin(chosen), prepend=True)
        model.register_forward_hook(_End(), always_call=True)


def activation_policy(model: nn.Module) -> ActivationPolicy | None:
    """The policy of ``model``; None without one."""
    begins = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _Begin)]
    return begins[0].policy if begins else None


_local = threading.local()


def _entered() -> list[tuple[nn.Module, Session | None]]:
    if not hasattr(_local, "entered"):
        _local.entered = []
    entered: list[tuple[nn.Module, Session | None]] = _local.entered
    return entered


class _Begin:
    """Hook before forward."""

    def __init__(self, policy: ActivationPolicy) -> None:
        self.policy = policy

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        session = Session(self.policy) if self._applies() else None
        if session is not None:
            SavedBytes.add(session)
            session.__enter__()
        _entered().append((model, session))

    def _applies(self) -> bool:
        if not torch.is_grad_enabled() or torch._C._get_tracing_state():
            return False
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or isinstance(getattr(hooks[0], "__self__", None), Session | SavedBytes):
            return True
        warnings.warn(
            "An activation policy has no effect inside of other saved-tensor hooks, such as those of gradient "
            "checkpointing around the model: they decide what is kept. Use one of the two.",
            stacklevel=2,
        )
        return False


class _End:
    """Hook after forward, or after what it raised."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        entered = _entered()
        if entered and entered[-1][0] is model and not torch.compiler.is_compiling():
            session = entered.pop()[1]
            if session is not None:
                session.__exit__(None, None, None)


def _remove(model: nn.Module, key: int) -> None:
    """As the handle of the hook would, which a copy of the model does not have."""
    for hooks in (
        model._forward_pre_hooks,
        model._forward_pre_hooks_with_kwargs,
        model._forward_hooks,
        model._forward_hooks_with_kwargs,
        model._forward_hooks_always_called,
    ):
        hooks.pop(key, None)
