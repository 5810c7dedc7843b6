"""What autograd nodes of ours keep themselves, told to whoever counts memory: hooks on saved tensors do not see it.

Torch frees saved tensors after one backward pass. Nodes that outlive it, those of halves, hold on to theirs instead.
"""

import threading
from collections.abc import Callable, Iterable

from torch import Tensor

__all__ = ["hear_of_kept", "stop_hearing", "tell_kept"]

Listener = Callable[[Iterable[Tensor]], None]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.listeners: list[Listener] = []


_of_thread = _OfThread()


def hear_of_kept(listener: Listener) -> None:
    """From now on call ``listener`` with the tensors that nodes made in this thread keep for their backward."""
    _of_thread.listeners.append(listener)


def stop_hearing(listener: Listener) -> None:
    """Call it no more."""
    _of_thread.listeners.remove(listener)


def tell_kept(tensors: Iterable[Tensor]) -> None:
    """Say that a node keeps ``tensors`` for its backward."""
    for listener in _of_thread.listeners:
        listener(tensors)
