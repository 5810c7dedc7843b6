"""A call of torch while it is being made: what it was given, and what autograd saves inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_comera.memory.call_kinds import draws_in_attention
from hf_comera.memory.lineage import Call, Input, Lineage, Node, Place, is_plain
from hf_comera.memory.random_draws import RandomDraws
from hf_comera.memory.sources import Saved

__all__ = ["PresentCall"]


class PresentCall:
    """Arguments with their nodes; and in order what is saved, of which some can get a source only afterwards.

    Args:
        func: A function or method of torch.
        args: Its arguments.
        kwargs: Likewise.
        lineage: Where the nodes of the arguments are found.
    """

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], lineage: Lineage
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.tensors = list(_tensors_in((args, kwargs)))
        self.is_plain = all(map(is_plain, self.tensors))
        """Whether no argument is a stand-in, of whatever sort, or lies in an unusual container."""
        self.nodes = [lineage.node(tensor) for tensor in self.tensors] if self.is_plain else []
        self.waiting: list[tuple[int, Saved, Tensor]] = []
        """What was made inside: its position among what is saved, and an alias."""
        self.num_saved = 0
        self.draws: RandomDraws | None = None
        if self.is_plain and draws_in_attention(func, args, kwargs) and torch.is_grad_enabled():
            self.draws = RandomDraws(self.tensors[0].device)

    def run(self) -> Any:
        """Make the call."""
        with nullcontext() if self.draws is None else self.draws.recorded():
            return self.func(*self.args, **self.kwargs)

    def wait(self, tensor: Tensor) -> Saved:
        """Stands for a tensor that was made inside the call."""
        saved = Saved(None, Place.of(tensor))
        self.waiting.append((self.num_saved - 1, saved, tensor.detach()))
        return saved

    def is_new(self, result: Any) -> bool:
        """Whether ``result`` has a storage of its own, so that it is no view and no argument changed in place."""
        if not self.is_plain or not isinstance(result, Tensor) or not is_plain(result):
            return False
        storage = result.untyped_storage()._cdata
        return all(storage != tensor.untyped_storage()._cdata for tensor in self.tensors)

    def as_call(self, kind: str, result: Tensor) -> Call:
        """What is needed to make the call again.

        Without tensors to go by, dtype and device are defaults of forward, which may be others in backward.
        """
        autocast, device_type = None, result.device.type
        if torch.amp.is_autocast_available(device_type):
            is_on = torch.is_autocast_enabled(device_type)
            autocast = (device_type, torch.get_autocast_dtype(device_type) if is_on else None)
        inputs = iter(range(len(self.tensors)))
        args, kwargs = _templated((self.args, self.kwargs), inputs)
        parents: list[tuple[Node, Place]] = [
            (node, Place.of(tensor)) for node, tensor in zip(self.nodes, self.tensors, strict=True)
        ]
        if not self.tensors:
            kwargs = {**kwargs, "dtype": result.dtype, "device": result.device}
        return Call(self.func, args, kwargs, kind, parents, autocast)


def _tensors_in(arguments: Any) -> Iterator[Any]:
    """The tensors among arguments, and the containers that could hide some: no template is made of those."""
    for item in arguments.values() if type(arguments) is dict else arguments:
        if isinstance(item, Tensor):
            yield item
        elif type(item) in (tuple, list, dict):
            yield from _tensors_in(item)
        elif isinstance(item, (tuple, list, dict)) and type(item) is not torch.Size:
            yield item


def _templated(arguments: Any, inputs: Iterator[int]) -> Any:
    """``arguments`` with an :class:`Input` for each tensor, in the order of ``_tensors_in``."""
    if isinstance(arguments, Tensor):
        return Input(next(inputs))
    if type(arguments) is dict:
        return {name: _templated(item, inputs) for name, item in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(_templated(item, inputs) for item in arguments)
    return arguments
