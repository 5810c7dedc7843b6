"""``set_activation_policy``: put a policy on a model, or take it off."""

from __future__ import annotations

import sys
import threading
import warnings
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_comera.memory.policy import NAMED_POLICIES, ActivationPolicy, as_policy
from hf_comera.memory.saved_bytes import SavedBytes
from hf_comera.memory.session import Session

__all__ = ["activation_policy", "set_activation_policy"]


def set_activation_policy(model: nn.Module, policy: str | ActivationPolicy | None) -> None:
    """Decide what becomes of the tensors that autograd keeps during ``model(...)``.

    The policy holds from the beginning to the end of the model's forward, loss included where the model computes it.
    It has no effect where no gradient is recorded; nor, which is said once, in compiled code, under a transform of
    ``torch.func``, and inside of other saved-tensor hooks such as those of gradient checkpointing, which then decide.

    Args:
        model: Any module; dense or in tensor-train form. A policy on a part of it holds for that part.
        policy: ``"keep"`` (as without a policy, also in a part of a model that has another), ``"rank"`` (exact:
            rebuild what is cheap), ``"rank+fp8"`` (what is left in FP8), ``"fp8"`` (all in FP8), an
            :class:`ActivationPolicy`; or None, which takes a policy off.

    Raises:
        TypeError: If ``model`` is no module.
        ValueError: If there is no policy of that name.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"set_activation_policy needs a model, a torch.nn.Module, and got {type(model).__name__}.")
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


class _Entered(NamedTuple):
    """A forward under way."""

    model: nn.Module
    session: Session | None
    frame: FrameType


_local = threading.local()


def _entered() -> list[_Entered]:
    if not hasattr(_local, "entered"):
        _local.entered = []
    entered: list[_Entered] = _local.entered
    return entered


class _Begin:
    """Hook before forward."""

    def __init__(self, policy: ActivationPolicy) -> None:
        self.policy = policy
        self._has_warned = False

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            _warn_of_compiler()
            return
        _leave_interrupted()
        session = Session(self.policy) if self._applies() else None
        if session is not None:
            SavedBytes.add(session)
            session.__enter__()
        _entered().append(_Entered(model, session, sys._getframe(1)))

    def _applies(self) -> bool:
        if not torch.is_grad_enabled() or torch._C._get_tracing_state():
            return False
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        owner = None if hooks is None else getattr(hooks[0], "__self__", None)
        if self.policy == NAMED_POLICIES["keep"] and not isinstance(owner, Session):
            return False
        if torch._C._are_functorch_transforms_active() or not torch._C._autograd._saved_tensors_hooks_is_enabled():
            self._warn("where saved-tensor hooks are not allowed, such as under a transform of torch.func")
            return False
        if hooks is None or isinstance(owner, Session | SavedBytes):
            return True
        self._warn(
            "inside of other saved-tensor hooks, such as those of gradient checkpointing around the model: they "
            "decide what is kept. Use one of the two"
        )
        return False

    def _warn(self, where: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"An activation policy has no effect {where}.", stacklevel=4)


class _End:
    """Hook after forward, or after what it raised."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        entered = _entered()
        if entered and entered[-1].model is model and not torch.compiler.is_compiling():
            session = entered.pop().session
            if session is not None:
                session.__exit__(None, None, None)


@torch.compiler.assume_constant_result
def _warn_of_compiler() -> None:
    """Called once a compilation, by the compiler."""
    warnings.warn(
        "An activation policy has no effect in compiled code: the compiler decides what is kept.", stacklevel=1
    )


def _leave_interrupted() -> None:
    """End forwards that were left without the hook after them: by what is no ``Exception``, such as Ctrl-C."""
    entered, running = _entered(), set()
    if not entered:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    while entered and entered[-1].frame not in running:
        session = entered[-1].session
        if session is not None:
            if not session.is_innermost():  # another time
                return
            session.__exit__(None, None, None)
        entered.pop()


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
