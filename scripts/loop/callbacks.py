"""Callbacks of scripts with a Trainer: seconds of its steps, one progress bar, and the end that was asked for."""

import time
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from loop.interrupt import Interrupt
from loop.outcome import training_bytes
from loop.progress import beside_bar


class StepCosts(TrainerCallback, ExportableState):
    """Seconds of each step, held-out measurements and checkpoints not counted, and bytes after the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first_bytes: dict[str, int] = {}
        self._since, self._num_read = 0.0, 0

    def state(self) -> dict[str, Any]:
        """The entry in ``trainer_state.json``."""
        return {"args": {}, "attributes": {"seconds": self.seconds, "first_bytes": self.first_bytes}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Go on from a checkpoint."""
        vars(self).update(state.stateful_callbacks[type(self).__name__]["attributes"])
        self._num_read = len(self.seconds)
        self._lap()

    def on_step_end(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """A step is done, as far as the host knows."""
        self.seconds.append(self._lap())
        if state.global_step == 1:
            self.first_bytes = training_bytes(model, optimizer)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Losses were read, for which the device was waited for; of which of these steps is not known."""
        waited, num_steps = self._lap(), len(self.seconds) - self._num_read
        if "loss" in (logs or {}) and num_steps:
            self.seconds[-num_steps:] = [seconds + waited / num_steps for seconds in self.seconds[-num_steps:]]
            self._num_read = len(self.seconds)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """What took this time was no step."""
        self._lap()

    on_save = on_evaluate

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before


class Progress(ProgressCallback):
    """One bar over the steps, with the newest figures beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, float] = {}

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """No bar of its own: it would break up that of the steps."""

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Show the figures."""
        self.figures.update(logs or {})
        if self.training_bar is not None:
            self.training_bar.set_postfix(beside_bar(self.figures), refresh=False)


class StoppedError(Exception):
    """A run was stopped, with a checkpoint of its last step."""


class StopWhenAsked(TrainerCallback):
    """Finishes the step at hand, has a checkpoint written, and ends the training.

    Args:
        interrupt: Knows whether it is to end.

    Raises:
        StoppedError: Once the checkpoint is there.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt, self.stops = interrupt, False

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Have what was trained so far logged and saved."""
        self.stops = self.interrupt.agreed() and state.global_step < state.max_steps
        if self.stops:
            control.should_log = control.should_save = True

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Leave; by an exception, since a training that ends has its ranks cut to the wanted size."""
        if self.stops:
            raise StoppedError
