"""Steps of the training loop that fail where they wait for the device, as they would have to in a CUDA graph."""

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hf_comera import RankAdapter
from hf_comera.modules.head_and_loss import HeadAndLoss
from hf_comera.training.cuda_graphs.capture import CaptureWatch
from hf_comera.tt.padding import RaggedStacks
from loop.callbacks import StepCosts

# On a CPU some of these leave no trace among the operations.
READS = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__bool__}


class NoReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_waiting():
    with NoReads(), CaptureWatch():
        yield


def unwatched(function):
    @functools.wraps(function)
    def call(*args):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args)

    return call


class ForbidWaiting(StepCosts):
    """Has every step of a Trainer fail that waits; ``steps`` has the numbers of those that did not."""

    def __init__(self):
        super().__init__()
        self.steps, self.watched = [], contextlib.ExitStack()

    def on_step_begin(self, args, state, control, **kwargs):
        self.watched.enter_context(no_waiting())

    def on_step_end(self, args, state, control, **kwargs):
        self.watched.close()
        self.steps.append(state.global_step)
        super().on_step_end(args, state, control, **kwargs)


def forbid_waiting_in(script, monkeypatch):
    """Have every step of a loop fail that waits, save for its batches; returns the numbers of those that did not."""
    take_step, steps = script.optimizer_step, []

    def watched(run, batches):
        fetched = iter([next(batches) for _ in range(run.settings.gradient_accumulation_steps)])
        with no_waiting():
            take_step(run, fetched)
        steps.append(run.step)

    monkeypatch.setattr(script, "optimizer_step", watched)
    return steps


def forbid_waiting(monkeypatch):
    """Watch neither cuts of ranks nor what a model asks the device for."""
    monkeypatch.setattr(RankAdapter, "_cut", unwatched(RankAdapter._cut))
    monkeypatch.setattr(RaggedStacks, "_indices", unwatched(RaggedStacks._indices))  # tables on the host, of shapes
    # The loss of a language model counts the tokens with a label, which steps as CUDA graphs do not
    monkeypatch.setattr(HeadAndLoss, "_loss", unwatched(HeadAndLoss._loss))
    # Transformers itself asks in every plain forward whether the mask hides anything
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"):
        monkeypatch.setattr(f"transformers.masking_utils.{name}", lambda *args, **settings: False)
