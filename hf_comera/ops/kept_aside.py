"""What autograd nodes of ours keep themselves, told to whoever counts memory: hooks on saved tensors do not see it.

Torch frees saved tensors after one backward pass. Nodes that outlive it, those of halves, hold on to theirs instead.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["hearing_of_kept", "tell_kept"]

Listener = Callable[[Iterable[Tensor]], None]

_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


@contextmanager
def hearing_of_kept(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with the tensors that nodes made within keep for their backward."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def tell_kept(tensors: Iterable[Tensor]) -> None:
    """Say that a node keeps ``tensors`` for its backward."""
    for listener in _listeners.get():
        listener(tensors)
