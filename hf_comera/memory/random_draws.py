"""The random numbers that a call draws, to draw the same ones when it is run again.

Zeros and ones, as dropout draws them, are kept as bits: on a CPU drawing them takes several times as long as reading
them. For any other draw, the state of the generator is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_comera.ops.bit_mask import BitMask

__all__ = ["RandomDraws"]

_BERNOULLI = torch.ops.aten.bernoulli_.float


class RandomDraws:
    """What was drawn on ``device`` within :meth:`recorded`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._state = _state(device)
        self._masks: list[BitMask] | None = []

    @property
    def can_repeat(self) -> bool:
        """Whether what was drawn can be drawn again; not all of it can where a CUDA graph is captured."""
        return self._masks is not None or self._state is not None

    @property
    def memory(self) -> list[Any]:
        """What is kept."""
        return [self._state] if self._masks is None else list(self._masks)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within, draws are written down."""
        with _Record() as record:
            yield
        self._masks = record.masks

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Within, the same is drawn again; afterwards it is as if nothing had been drawn."""
        if self._masks is not None:
            with _Repeat(self._masks):
                yield
            return
        if self._state is None:
            raise RuntimeError("What a CUDA graph draws cannot be drawn again.")
        on_gpu = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if on_gpu else []):
            if on_gpu:
                torch.cuda.set_rng_state(self._state, self.device)
            else:
                torch.set_rng_state(self._state)
            yield


def _state(device: torch.device) -> torch.Tensor | None:
    if device.type != "cuda":
        return torch.get_rng_state()
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.get_rng_state(device)


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[BitMask] | None = []
        """None once something else than zeros and ones was drawn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _BERNOULLI and self.masks is not None:
            self.masks.append(BitMask.of(out))
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.masks = None
        return out


class _Repeat(TorchDispatchMode):
    def __init__(self, masks: list[BitMask]) -> None:
        super().__init__()
        self._masks = iter(masks)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _BERNOULLI:
            return args[0].copy_(next(self._masks).decode())
        return func(*args, **(kwargs or {}))
