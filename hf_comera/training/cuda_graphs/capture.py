"""``CudaCapture``: work on a GPU recorded as CUDA graphs; every call of torch that concerns graphs is in this file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_comera.modules.halves_cache import drop_cached_halves
from hf_comera.optim import CoatAdamW, TTMuon

__all__ = ["CaptureWatch", "CudaCapture", "DeviceRates", "why_not_captured"]

aten = torch.ops.aten
_READS = {aten._local_scalar_dense, aten.equal, aten.allclose, aten.is_nonzero, aten._linalg_check_errors}
_BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._unsafe_index_put}
_COPIES = {aten.copy_, aten._to_copy}


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
        """The reason against graphs on ``device``, or None."""
        if device.type != "cuda":
            return f"the model is on {device.type!r}, and CUDA graphs need a CUDA device"
        return None

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the side stream, where it also will be recorded: libraries set themselves up in it."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        drop_cached_halves()  # autograd remembers on which stream their gradients are made
        with torch.cuda.stream(self._stream):
            function()
        drop_cached_halves()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record what ``function`` does on the device, without doing it; the result does it.

        Raises:
            RuntimeError: If the function waits for the device, or does something else that a graph cannot hold.
        """
        graph, watch = torch.cuda.CUDAGraph(), CaptureWatch()
        for generator in self.generators:
            graph.register_generator_state(generator)
        drop_cached_halves()
        torch.clear_autocast_cache()
        current = torch.cuda.current_stream(self.device)
        try:
            # thread_local: a thread that pins the memory of the next batch may go on with it
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode), watch:
                function()
        finally:
            torch.cuda.set_stream(current)  # where CUDA ends a recording itself, torch stays on the one of the graph
            drop_cached_halves()
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
    """Holds on to every tensor from outside that the operations within use, and refuses what a graph cannot hold.

    A graph knows addresses only. Parameters live long enough, but it also reads tables of indices out of caches, which
    drop them whenever they like. A value that is read decides which operations are recorded, and all replays would
    stay with it. CUDA refuses that for its own memory, but a model may draw on the host, say which layers to leave
    out. Where CUDA refuses by itself, it ends the recording, after which torch may not draw random numbers any more.
    So everything that waits for the device is refused here, before CUDA sees it.

    Raises:
        RuntimeError: If a value is read on the host, the size of a result depends on values, or a copy between host
            and device is waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reason := _why_not_held(func, args, kwargs or {}):
            raise RuntimeError(reason)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and _place(tensor) not in self._made:
                self._found.setdefault(_place(tensor), tensor)
        result = func(*args, **(kwargs or {}))
        self._made |= {_place(tensor) for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}
        return result

    def tensors(self) -> list[Tensor]:
        """One for each piece of memory, without gradients."""
        return [tensor.detach() for tensor in self._found.values()]


def _why_not_held(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a graph cannot hold an operation; None if it can."""
    packet = func.overloadpacket
    if packet in _READS:
        return f"the step reads a value of a tensor on the host ({func}), with which all replays would stay"
    has_mask = packet in _BY_INDEX and _selects_by_mask(*args[:3])
    has_sizes = torch.Tag.dynamic_output_shape in func.tags and packet is not aten.index
    if has_mask or (has_sizes and kwargs.get("output_size") is None):
        what = "selects by a boolean mask" if has_mask else "makes a result whose size depends on values"
        return f"the step {what} ({func}), for which the host waits; use sizes that are known, say by torch.where"
    if packet in _COPIES and _is_waited_for(packet, args, kwargs):
        return f"the step waits for a copy between host and device ({func}); copy beforehand, or make it on the device"
    return None


def _is_waited_for(packet: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for a copy, which it does between itself and a device; single numbers may be launched."""
    to, source = (args[0].device, args[1]) if packet is aten.copy_ else (kwargs.get("device"), args[0])
    kinds = {source.device.type, source.device.type if to is None else torch.device(to).type}
    non_blocking = kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])
    is_number = source.device.type == "cpu" and source.numel() == 1
    return len(kinds) > 1 and "cpu" in kinds and not non_blocking and not is_number


def _selects_by_mask(tensor: Tensor, indices: Any, values: Tensor | None = None) -> bool:
    """Whether torch looks for the places of a mask, which has no fixed number of them."""
    masks = [each for each in indices if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)]
    # one number in all places of one mask is written by masked_fill
    is_filled = values is not None and values.numel() == 1 and values.device.type == "cpu" and len(indices) == 1
    return bool(masks) and not is_filled


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


OURS = (TTMuon, CoatAdamW)
"""Their steps read nothing on the host, and keep their state where it is."""


class DeviceRates:
    """One scalar tensor for each group of an optimizer; schedulers and checkpoints go on seeing the floats.

    Args:
        optimizer: One that :func:`why_not_captured` has nothing against.
        device: Of its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        exact = isinstance(optimizer, OURS) or device.type == "cpu"  # kernels of torch's optimizers read float32
        dtype = torch.float64 if exact else torch.float32
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]
        self._values: list[float | None] = [None] * len(self._rates)

    def update(self) -> None:
        """Copy the rates of the groups to the device, where a scheduler has changed them."""
        for index, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self._rates[index].copy_(rate)
            elif (value := float(rate)) != self._values[index]:
                self._rates[index].fill_(value)
                self._values[index] = value

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the tensors into the groups, and the optimizer into a mode in which torch lets it be recorded."""
        groups = self._optimizer.param_groups
        before: list[dict[str, Any]] = [
            {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
        ]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True  # fused ones are, but torch asks
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def why_not_captured(optimizer: torch.optim.Optimizer) -> str | None:
    """Why steps of ``optimizer`` cannot be recorded; None if they can."""
    if isinstance(optimizer, OURS):
        return None
    if all(group.get("capturable") or group.get("fused") for group in optimizer.param_groups):
        return None
    return (
        f"{type(optimizer).__name__} keeps its rates or step counts on the host; use TTMuon, CoatAdamW, or an "
        "optimizer of torch made with capturable=True or fused=True"
    )
