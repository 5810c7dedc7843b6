"""``predict_speed``: how long a training step takes, from counted operations and two rates of the machine.

A step is carried out on tensors that have sizes but no entries. Each operation takes as long as its arithmetic at the
machine's rate of matrix products, or as reading its operands and writing its result, whichever is longer.

Source: roofline model: Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from transformers import PreTrainedModel

from hf_comera.memory import ActivationPolicy, set_activation_policy
from hf_comera.memory.estimate import FakeStep, example_batch

__all__ = ["MachineRates", "StepPrediction", "predict_speed"]

aten = torch.ops.aten

TIMED_SIZE, TIMED_ENTRIES, TIMES = 1024, 1 << 22, 15
"""Of the square matrices and the vector that rates are measured with, and how often."""


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """What a machine does in a second."""

    flops: float
    """Multiplications and additions of large matrix products, in the dtype of the model."""
    bytes: float
    """Read and written by functions of single entries."""

    @classmethod
    def measure(cls, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> "MachineRates":
        """Time a matrix product and exponentials on ``device``, which takes well below a second.

        Exponentials of a tensor of activations, into new memory, stand between additions, several times as fast on a
        CPU, and random numbers, several times as slow.
        """
        square = torch.ones(TIMED_SIZE, TIMED_SIZE, device=device, dtype=dtype)
        vector = torch.ones(TIMED_ENTRIES, device=device)
        product = _seconds(lambda: square @ square, square.device)
        function = _seconds(vector.exp, vector.device)
        return cls(flops=2 * TIMED_SIZE**3 / product, bytes=2 * vector.nbytes / function)


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """What was counted of one training step, optimizer included, and the time that follows at ``rates``."""

    flops: int
    """Of matrix products, convolutions and attention; other operations only move bytes here."""
    bytes: int
    """Read and written by all operations, each tensor once an operation."""
    seconds: float
    rates: MachineRates


def predict_speed(
    model: PreTrainedModel,
    *,
    batch_size: int = 1,
    seq_len: int = 512,
    rates: MachineRates | None = None,
    policy: str | ActivationPolicy | None = None,
    autocast: torch.dtype | None = None,
) -> StepPrediction:
    """Predict how long a training step of ``model`` takes; nothing is trained and no weight is read.

    The ratio of two predictions, say dense over compressed, is more certain than either: what caches keep, and what
    calls cost, is not counted. Every token has a label, so the head of a masked language model counts for more than in
    its training.

    Args:
        model: Any model of Transformers with a loss, dense or compressed; one on the meta device is taken to train on
            the CPU.
        batch_size: Rows of the batch.
        seq_len: Tokens a row.
        rates: Of the machine that will train. None: measured on the model's device.
        policy: What becomes of saved activations. None: all are kept.
        autocast: Dtype of autocast, where training will use it.

    Raises:
        ValueError: If no batch can be made up for the model, a size is out of range, or the step reads entries of
            tensors, so that it cannot be tried without them.
    """
    batch, mode = example_batch(model, batch_size, seq_len), FakeTensorMode()
    step = FakeStep(model, torch.optim.AdamW(model.parameters()), mode, batch, autocast)
    rates = rates or MachineRates.measure(step.device, autocast or model.dtype)
    try:
        with mode:
            step.warm_up()
            set_activation_policy(step.model, policy)
            with _Count(rates) as count:
                step.update(step.loss())
    except DataDependentOutputException as error:
        raise ValueError(
            f"{type(model).__name__} reads entries of a tensor ({error}), so its step cannot be counted without them."
        ) from error
    return StepPrediction(flops=count.flops, bytes=count.bytes, seconds=count.seconds, rates=rates)


class _Count(TorchDispatchMode):
    """Adds up what is dispatched within, also inside custom operators."""

    def __init__(self, rates: MachineRates) -> None:
        super().__init__()
        self.rates = rates
        self.flops, self.bytes, self.seconds = 0, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a property
            return func(*args, **kwargs)
        if func._schema.name in OPDEFS:
            try:
                with self:
                    return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                pass  # it reads entries, such as a seed or ids: what was counted so far and its result are the cost
        elif torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if not _is_view(func):
            self._add(_flops(func, args, kwargs, result), _num_bytes((args, kwargs, result)))
        return result

    def _add(self, flops: int, num_bytes: int) -> None:
        self.flops += flops
        self.bytes += num_bytes
        self.seconds += max(flops / self.rates.flops, num_bytes / self.rates.bytes)


def _is_view(func: Any) -> bool:
    """Whether the result is what was given under another shape: no entry is touched."""
    aliases = [output.alias_info for output in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases) or "empty" in func._schema.name


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = func._overloadpacket
    if packet in _ATTENTION_ON_A_CPU:
        query, key, value = args[_ATTENTION_ON_A_CPU[packet] :][:3]
        passes = 1 if packet is aten._scaled_dot_product_flash_attention_for_cpu else 2.5
        return int(passes * sdpa_flop_count(query.shape, key.shape, value.shape))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


_ATTENTION_ON_A_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: 0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}
"""Where the query is among the arguments. torch has no formula for these; backward is five products for two."""


def _num_bytes(values: Any) -> int:
    """Of all tensors in ``values``; one that repeats its entries counts what is stored."""
    tensors = [item for item in tree_leaves(values) if isinstance(item, Tensor)]
    return sum(min(item.numel() * item.itemsize, item.untyped_storage().nbytes()) for item in tensors)


def _seconds(call: Any, device: torch.device) -> float:
    """The shortest of several calls: what else a machine has to do is no property of it."""
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
