"""``TapeCapture``: what ``CudaCapture`` does, on a CPU: operations are taped with their memory and done again.

As in a CUDA graph, all that Python computed while the tape was made is frozen: numbers, shapes, addresses. Recording
changes nothing, and a function that reads from the device cannot be recorded. Emulated kernels are on the tape as the
operators that launch them.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_comera.modules import halves_cache
from hf_comera.modules.halves_cache import drop_cached_halves
from hf_comera.ops.ttm_embedding import _ttm_lookup
from hf_comera.training.cuda_graphs.capture import CaptureWatch


def use_tape(monkeypatch):
    """Put the tape in the place of CUDA graphs, and have all code believe that it is on a GPU where that matters."""
    monkeypatch.setattr("hf_comera.training.cuda_graphs.step.CudaCapture", TapeCapture)
    monkeypatch.setattr(halves_cache, "_capturing", lambda core: Tape.running)
    monkeypatch.setitem(_ttm_lookup._init_fn.__globals__, "_needs_static_shapes", lambda ids: True)
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)


class TapeCapture:
    def __init__(self, device, generators=()):
        self.generators, self.num_forgotten, self.watch = generators, 0, None

    @staticmethod
    def why_not(device):
        return None

    def warm_up(self, function):
        function()

    def record(self, function):
        drop_cached_halves()
        tape, self.watch, random_state = Tape(), CaptureWatch(), torch.get_rng_state()
        try:
            with tape, self.watch:
                function()
        finally:
            torch.set_rng_state(random_state)
            tape.rewind()
            drop_cached_halves()
        return tape.play

    def forget(self):
        self.num_forgotten += 1


class Tape(TorchDispatchMode):
    running = False

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.made = [], {}, set()

    def __enter__(self):
        Tape.running = True
        return super().__enter__()

    def __exit__(self, *error):
        Tape.running = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        for tensor in inputs:
            place = tensor.untyped_storage()._cdata
            if place not in self.made and place not in self.before:
                self.before[place] = (tensor.detach(), tensor.untyped_storage().clone())
        result = func(*args, **kwargs)
        outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [tensor.untyped_storage()._cdata not in known for tensor in outputs]
        self.made |= {
            tensor.untyped_storage()._cdata for tensor in outputs if tensor.untyped_storage()._cdata not in known
        }
        if any(new) or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, outputs, new))
        return result

    def rewind(self):
        """Give all memory from outside back what was in it."""
        for tensor, content in self.before.values():
            tensor.untyped_storage().copy_(content)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # its casts are on the tape
    def play(self):
        for func, args, kwargs, outputs, new in self.calls:
            again = [tensor for tensor in tree_leaves(func(*args, **kwargs)) if isinstance(tensor, Tensor)]
            for old, made, is_new in zip(outputs, again, new, strict=True):
                if is_new:
                    old.detach().copy_(made)
