"""``CudaCapture``: work on a GPU recorded as CUDA graphs; every call of torch that concerns graphs is in this file."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_comera.modules.halves_bank import drop_kept_halves

__all__ = ["CaptureWatch", "CudaCapture"]


class CudaCapture:
    """Records functions on one side stream, into one pool of memory that all graphs share.

    They share it since no two are replayed at once, and what they return is copied out of the pool by the function.

    Args:
        device: A CUDA device.
        generators: Random number generators that the functions use, besides that of the device.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self.device, self.generators = device, list(generators)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """What stands against graphs on ``device``; None if nothing does."""
        if device.type != "cuda":
            return f"the model is on {device.type!r}, and CUDA graphs need a CUDA device"
        return None

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the side stream, where it also will be recorded: libraries set themselves up in it."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        drop_kept_halves()  # autograd remembers on which stream their gradients are made
        with torch.cuda.stream(self._stream):
            function()
        drop_kept_halves()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record what ``function`` does on the device, without doing it; the result does it.

        Raises:
            RuntimeError: If the function waits for the device, or does something else that a graph cannot hold.
        """
        graph, watch = torch.cuda.CUDAGraph(), CaptureWatch()
        for generator in self.generators:
            graph.register_generator_state(generator)
        drop_kept_halves()
        torch.clear_autocast_cache()
        try:
            # thread_local: a thread that pins the memory of the next batch may go on with it
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode), watch:
                function()
        finally:
            drop_kept_halves()
            torch.clear_autocast_cache()
        return _Replay(graph, watch.tensors())

    def forget(self) -> None:
        """Wait for the last replay, and begin a new pool; call it once the recorded functions are let go of."""
        torch.cuda.synchronize(self.device)
        self._pool = torch.cuda.graph_pool_handle()


class _Replay:
    """A graph, and the tensors that it reads, which must not go before it does."""

    def __init__(self, graph: torch.cuda.CUDAGraph, tensors: list[Tensor]) -> None:
        self._graph, self._tensors = graph, tensors

    def __call__(self) -> None:
        self._graph.replay()


class CaptureWatch(TorchDispatchMode):
    """Holds on to every tensor from outside that the operations within use, and lets no value be read on the host.

    A graph knows addresses only. Parameters live long enough, but it also reads tables of indices out of caches, which
    drop them whenever they like. A value that is read decides what is recorded, and all replays would stay with it:
    CUDA refuses that for its own memory, but a model may draw on the host, say which layers to leave out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the step reads a value of a tensor on the host, with which all replays would stay")
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and _place(tensor) not in self._made:
                self._found.setdefault(_place(tensor), tensor)
        result = func(*args, **(kwargs or {}))
        self._made |= {_place(tensor) for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}
        return result

    def tensors(self) -> list[Tensor]:
        """One for each piece of memory, without gradients."""
        return [tensor.detach() for tensor in self._found.values()]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
