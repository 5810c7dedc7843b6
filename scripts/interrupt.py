"""An orderly stop: Ctrl-C and termination signals are remembered until the step at hand is finished."""

import signal
from types import FrameType

import torch
from accelerate import Accelerator


class Interrupt:
    """Remembers Ctrl-C or a termination signal, so that the step at hand can be finished first."""

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

    def agreed(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked to stop; all processes get the same answer, for which several wait."""
        if accelerator.num_processes == 1:
            return bool(self.signal_number)
        flag = torch.tensor(int(bool(self.signal_number)), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum").item())
