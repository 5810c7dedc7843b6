"""One forward pass under a policy: calls are written down, and each tensor that autograd wants gets its source."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hf_comera.memory.call_kinds import (
    UNRECORDED,
    apply_mask,
    autocasts,
    dropped_share,
    is_product,
    kind_of,
    needs_exact,
    weight_among,
    writes_arguments,
)
from hf_comera.memory.claims import Claims
from hf_comera.memory.lineage import Call, Input, Lineage, Node, Place, is_plain
from hf_comera.memory.policy import ActivationPolicy
from hf_comera.memory.present_call import PresentCall
from hf_comera.memory.sources import Packed, Rerun, RerunOutput, Saved, Source
from hf_comera.ops.bit_mask import BitMask
from hf_comera.ops.dropped_attention import bias_of_mask

__all__ = ["Session"]


class Session(TorchFunctionMode):
    """Sees each call of torch before it is made, and each tensor that autograd saves."""

    def __init__(self, policy: ActivationPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.lineage = Lineage()
        self.claims = Claims(policy, self.lineage)
        self._calls: list[PresentCall] = []
        self._hooks: Any = None

    def __enter__(self) -> Session:
        super().__enter__()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, Saved.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        self._hooks = None  # it refers to this session, which would live on with all parameters
        super().__exit__(*exception)
        self.lineage.clear()

    def is_innermost(self) -> bool:
        """Whether nothing of either sort has been entered since."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        modes = _get_current_function_mode_stack()
        return bool(modes) and modes[-1] is self and hooks is not None and hooks[0] == self._pack

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call, and write down how its result came about."""
        kwargs = kwargs or {}
        if func in UNRECORDED or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if not torch.is_grad_enabled() or "out" in kwargs:  # within autograd functions
            self._mark_weight(func, args)
            return func(*args, **kwargs)
        args, kwargs = self._cast(func, args), self._cast(func, kwargs)
        present = PresentCall(func, args, kwargs, self.lineage)
        self._mark_weight(func, args)
        self._calls.append(present)
        result = None
        try:
            result = present.run()
        finally:
            self._calls.pop()
            self._settle(present, result)
        return result

    def _cast(self, func: Callable[..., Any], arguments: Any) -> Any:
        """Make the casts of activations that autocast is about to make, so that they are written down."""
        if not autocasts(func):
            return arguments
        if type(arguments) is dict:
            return {name: self._cast_one(item) for name, item in arguments.items()}
        return tuple(map(self._cast_one, arguments))

    def _cast_one(self, item: Any) -> Any:
        if type(item) not in (Tensor, FakeTensor) or item.dtype != torch.float32 or not item.requires_grad:
            return item
        kind = item.device.type
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return item
        return self.__torch_function__(Tensor.to, (), (item, torch.get_autocast_dtype(kind)))

    def _pack(self, tensor: Tensor) -> Saved:
        with torch._C.DisableTorchFunction():
            present = self._calls[-1] if self._calls else None
            if present is not None:
                present.num_saved += 1
            if not is_plain(tensor):
                return Saved(self.claims.keep_whole(tensor), None)
            node = self.lineage.find(tensor)
            if node is None and present is not None:
                return present.wait(tensor)
            if node is None:
                return Saved(self.claims.keep(tensor), Place.of(tensor))
            return Saved(self._claim(present, node, tensor), Place.of(tensor))

    def _claim(self, present: PresentCall | None, node: Node, tensor: Tensor) -> Source:
        """The source of what ``present`` saves: of its arguments or its result."""
        if present is None:
            return self.claims.claim(node, tensor)
        if needs_exact(present.func):
            return self.claims.claim_exact(node, tensor)
        return self.claims.claim(node, tensor, for_product=is_product(present.func))

    def _settle(self, present: PresentCall, result: Any) -> None:
        """Write down how ``result`` came about, and find sources for what was saved inside the call."""
        node = self._recorded(present, result) if present.is_new(result) else None
        if present.func == Tensor.data.__get__:  # what is written to its result is not seen
            self.lineage.add(present.tensors[0], None)
        rerun = self._rerun(present, node)
        for index, saved, tensor in present.waiting:
            if saved.source is not None:
                continue
            own = self.lineage.find(tensor)
            if own is not None and own is node:
                exact = needs_exact(present.func)
                saved.source = self.claims.claim_exact(node, result) if exact else self.claims.claim(node, result)
            elif rerun is not None and own is None and self.claims.is_large(tensor):
                saved.source = RerunOutput(rerun, index, saved.place)
                self.claims.sources.add(saved.source)
            else:
                saved.source = self.claims.keep(tensor)

    def _mark_weight(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        weight = weight_among(func, args)
        if weight is not None and is_plain(weight):
            self.lineage.node(weight).is_weight = True

    def _recorded(self, present: PresentCall, result: Tensor) -> Node:
        kind = kind_of(present.func, present.tensors, result)
        if kind is None or writes_arguments(present.func, present.args, present.kwargs):
            return self.lineage.add(result, None)
        if kind == "attention":
            self._note_bias(present)
        return self.lineage.add(result, self._dropout(present) if kind == "dropout" else present.as_call(kind, result))

    def _dropout(self, present: PresentCall) -> Call | None:
        """Applying the same mask again, if one was saved."""
        x = present.tensors[0]
        for _, saved, mask in present.waiting:
            if mask.shape == x.shape and self.policy.dropout == "bits" and self.claims.is_large(mask):
                node = self.lineage.add(mask, None)
                saved.source = self.claims.note(node, Packed(BitMask.of(mask), saved.place))
                args = Input(0), Input(1), 1 - dropped_share(present.args, present.kwargs)
                parents = [(present.nodes[0], Place.of(x)), (node, saved.place)]
                return Call(apply_mask, args, {}, "dropout", parents, None)
        return None

    def _note_bias(self, present: PresentCall) -> None:
        """What core attention makes of a mask of bools, once a layer, can be made from the mask again.

        Only on a CPU: elsewhere the program would wait to know whether the two are equal.
        """
        masks = [pair for pair in zip(present.nodes, present.tensors, strict=True) if pair[1].dtype == torch.bool]
        for node, mask in masks:
            for _, saved, bias in present.waiting:
                if bias.shape != mask.shape or bias.device.type != "cpu" or type(bias) is not Tensor:
                    continue
                if torch.equal(bias, bias_of_mask(mask, bias.dtype)):
                    call = Call(bias_of_mask, (Input(0), bias.dtype), {}, "functions", [(node, Place.of(mask))], None)
                    saved.source = self.claims.claim(self.lineage.add(bias, call), bias)

    def _rerun(self, present: PresentCall, node: Node | None) -> Rerun | None:
        """How to run a product of attention, or all of core attention, again if that spares what it saves inside."""
        if node is None or node.call is None or node.call.kind not in ("attention", "scores"):
            return None
        inside = [tensor for _, _, tensor in present.waiting if self.lineage.find(tensor) is None]
        recompute = node.call.kind == "attention" and self.policy.rebuilds("attention")
        if node.call.kind == "attention" and not recompute:
            stores_scores = sum(tensor.numel() for tensor in inside) > 2 * present.tensors[0].numel()
            inside = inside if stores_scores else []
        elif node.call.kind == "scores":
            inside = [tensor for tensor in inside if self.claims.is_large(tensor)]
        can_repeat = present.draws is None or present.draws.can_repeat
        if not (inside or recompute) or not self.policy.rebuilds("scores") or not can_repeat:
            return None
        sources = [self.claims.claim(*pair) for pair in zip(present.nodes, present.tensors, strict=True)]
        need_grad = [tensor.requires_grad for tensor in present.tensors]
        rerun = Rerun(node.call, sources, need_grad, present.draws, present.num_saved)
        node.call.rerun = weakref.ref(rerun)
        return rerun
