"""``estimate_memory``: what training a model takes, part by part and at most, for each activation policy.

A training step is carried out on tensors that have sizes but no entries, with the same calls as the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_comera.memory.attach import activation_policy, set_activation_policy
from hf_comera.memory.example_batch import example_batch
from hf_comera.memory.fake_copy import fake_copy
from hf_comera.memory.live_bytes import LiveBytes
from hf_comera.memory.policy import NAMED_POLICIES, ActivationPolicy, as_policy
from hf_comera.memory.saved_bytes import SavedBytes
from hf_comera.modules.halves_bank import core_copies
from hf_comera.modules.tt_linear import TTLinear
from hf_comera.ops.cuda.dispatch import kernels_serve
from hf_comera.ops.precision import chain_dtype

__all__ = ["MemoryEstimate", "PolicyMemory", "activation_bytes_by_megatron", "estimate_memory"]


@dataclass(frozen=True, kw_only=True)
class PolicyMemory:
    """Bytes of a training step under one policy."""

    activations: int
    """What autograd keeps from forward to backward."""
    peak: int
    """The most that is there at one time, weights and optimizer state included."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a training step. Print it, or :meth:`plot` it."""

    weights: int
    gradients: int
    optimizer: int
    policies: dict[str, PolicyMemory]
    """By name; the first is the model's present policy."""
    batch: str
    """What was estimated, in words."""

    def __str__(self) -> str:
        """The table."""
        console = Console(width=100, no_color=True)
        with console.capture() as capture:
            console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __rich__(self) -> Table:
        """The table for ``rich.print``."""
        table = Table(title=f"Memory of a training step, estimated: {self.batch}", show_edge=False, pad_edge=False)
        for heading in ("activation policy", "weights", "gradients", "optimizer", "activations", "peak"):
            table.add_column(heading, justify="left" if heading == "activation policy" else "right")
        for name, policy in self.policies.items():
            parts = self.weights, self.gradients, self.optimizer, policy.activations, policy.peak
            table.add_row(name, *(f"{part / 1e6:,.1f} MB" for part in parts))
        return table

    def plot(self, path: str | Path) -> Path:
        """Draw a bar of parts for each policy, with its peak.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from hf_comera.memory.estimate_picture import draw

        return draw(self, Path(path))


def estimate_memory(
    model: PreTrainedModel,
    *,
    batch_size: int = 1,
    seq_len: int = 512,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Mapping[str, Any] | None = None,
    policies: Sequence[str] | Mapping[str, ActivationPolicy | None] = tuple(NAMED_POLICIES),
    autocast: torch.dtype | None = None,
) -> MemoryEstimate:
    """Estimate weights, gradients, optimizer state, kept activations and the peak of a training step.

    Nothing is trained and nothing of the size of an activation is allocated. Counted are tensors: not what the
    allocator rounds up, nor the libraries themselves.

    Args:
        model: Any model of Transformers with a loss, dense or compressed, on the device that it will train on.
        batch_size: Rows of the batch.
        seq_len: Tokens a row.
        optimizer: An optimizer of the model; it is not stepped. Default: torch's AdamW.
        inputs: A batch to estimate for in place of ``batch_size`` and ``seq_len``; only its shapes matter.
        policies: Policies to compare with the present one, by name; or a mapping from names to policies.
        autocast: Dtype of autocast, where training will use it.

    Raises:
        ValueError: If a policy is unknown, no batch can be made up for the model, a size or dtype is out of range,
            the optimizer trains none of the model's parameters or others too, or the step reads entries of tensors,
            so that it cannot be tried without them.
    """
    _check(model, optimizer, autocast)
    chosen = {name: as_policy(name) for name in policies} if not isinstance(policies, Mapping) else dict(policies)
    present = activation_policy(model)
    if present not in chosen.values():
        chosen = {"now": present, **chosen}
    batch = dict(inputs) if inputs is not None else example_batch(model, batch_size, seq_len)
    mode = FakeTensorMode()
    step = _FakeStep(model, optimizer or torch.optim.AdamW(model.parameters()), mode, batch, autocast)
    try:
        with mode:
            gradients = step.warm_up()
            found = {name: step.measure(policy) for name, policy in tqdm(chosen.items(), "policies", leave=False)}
    except torch._subclasses.fake_tensor.DataDependentOutputException as error:
        raise ValueError(
            f"{type(model).__name__} or {type(step.optimizer).__name__} reads entries of a tensor ({error}), so the "
            "step cannot be tried out without them. Pass inputs without a mask, or another optimizer."
        ) from error
    shapes = ", ".join(f"{name} {'x'.join(map(str, item.shape))}" for name, item in step.batch.items())
    return MemoryEstimate(
        weights=step.weights, gradients=gradients, optimizer=step.optimizer_bytes(), policies=found, batch=shapes
    )


def activation_bytes_by_megatron(seq_len: int, batch_size: int, hidden_size: int, num_heads: int) -> int:
    """Bytes that a layer keeps without a policy: 16 bits an entry, masks of bytes, stored scores, FFN of 4 h.

    Source:
        Korthikanti et al., arXiv:2205.05198, section 4.1: ``s b h (34 + 5 a s / h)``.
    """
    return seq_len * batch_size * (34 * hidden_size + 5 * num_heads * seq_len)


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None, autocast: Any) -> None:
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise ValueError(f"autocast={autocast!r} is not a dtype. Use for example torch.bfloat16, or None.")
    if optimizer is None:
        return
    own = {id(parameter) for parameter in model.parameters()}
    trained = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(parameter not in own for parameter in trained)
    if foreign or not trained:
        raise ValueError(
            f"{foreign} of the {len(trained)} parameters of the {type(optimizer).__name__} are not those of this "
            f"{type(model).__name__}. Make the optimizer for this model: torch.optim.AdamW(model.parameters())."
        )


class _FakeStep:
    """Training steps of a fake copy."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: FakeTensorMode,
        batch: dict[str, Any],
        autocast: torch.dtype | None,
    ) -> None:
        device = next(model.parameters()).device
        self.model, self.optimizer = fake_copy(model, optimizer, mode)
        self.model.train()
        tensors = {name: item for name, item in batch.items() if isinstance(item, Tensor)}
        self.batch = {name: mode.from_tensor(item.to(device), static_shapes=True) for name, item in tensors.items()}
        self.weights = _num_bytes([*self.model.parameters(), *self.model.buffers()])
        self.core_copies = _core_copies(self.model)
        self.autocast, self.device = autocast, device

    def loss(self) -> Tensor:
        """The loss of the batch."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss: Tensor = self.model(**self.batch)[0]
        return loss

    def warm_up(self) -> int:
        """A step after which the optimizer has its state; gives the bytes of gradients."""
        set_activation_policy(self.model, None)
        self.loss().backward()
        gradients = _num_bytes([tensor.grad for tensor in self.model.parameters() if tensor.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradients

    def measure(self, policy: ActivationPolicy | None) -> PolicyMemory:
        """A step under ``policy``."""
        set_activation_policy(self.model, policy)
        live = LiveBytes()
        with live:
            with SavedBytes(self.model.parameters()) as saved:
                loss = self.loss()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        activations, peak = (found + self.core_copies for found in (saved.total, live.peak))
        return PolicyMemory(activations=activations, peak=self.weights + self.optimizer_bytes() + peak)

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        states = self.optimizer.state.values()
        return _num_bytes([item for state in states for item in state.values() if isinstance(item, Tensor)])


def _core_copies(model: nn.Module) -> int:
    """Bytes of cores that stacked halves copy for their own backward; those of stand-ins are built one by one.

    Cores that are converted are copied in both.
    """
    layers = [module for module in model.modules() if isinstance(module, TTLinear)]
    cores = {layer: layer.core_0 for layer in layers if layer.core_0.requires_grad}
    return core_copies(
        layer for layer, core in cores.items() if chain_dtype(core) == core.dtype and not kernels_serve(core.device)
    )


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
