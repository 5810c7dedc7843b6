"""Ctrl-C and termination signals: the step at hand is finished first, in all processes alike."""

import signal
from types import FrameType

import torch
from accelerate import PartialState
from accelerate.utils import reduce


class Interrupt:
    """Remembers Ctrl-C or a termination signal."""

    def __init__(self) -> None:
        self.signal_number = 0

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal_number:  # asked twice: do not wait
            raise KeyboardInterrupt
        self.signal_number = number

    def agreed(self) -> bool:
        """Whether any process was asked to stop; all processes get the same answer, for which several wait."""
        state = PartialState()
        if state.num_processes == 1:
            return bool(self.signal_number)
        flag = torch.tensor(int(bool(self.signal_number)), device=state.device)
        return bool(reduce(flag, reduction="sum").item())
