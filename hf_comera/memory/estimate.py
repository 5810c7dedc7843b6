"""``estimate_memory``: the memory of training a model, part by part and at its peak, for each activation policy.

A training step is carried out on tensors that have sizes but no entries, with the same calls as the real one.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
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

from hf_comera.memory.attach import SavedBytes, activation_policy, set_activation_policy
from hf_comera.memory.policy import NAMED_POLICIES, ActivationPolicy, as_policy
from hf_comera.modules.halves_cache import core_copies
from hf_comera.modules.tt_linear import TTLinear
from hf_comera.ops.cuda.dispatch import kernels_serve
from hf_comera.ops.precision import chain_dtype

__all__ = [
    "FakeStep",
    "MemoryEstimate",
    "PolicyMemory",
    "activation_bytes_by_megatron",
    "estimate_memory",
    "example_batch",
    "example_inputs",
]

_ONE_LABEL_A_ROW = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


@dataclass(frozen=True, kw_only=True)
class PolicyMemory:
    """Bytes of a training step under one policy."""

    activations: int
    """Bytes that autograd saves from forward to backward."""
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
    """The estimated batch, in words."""

    def __str__(self) -> str:
        """The table."""
        console = Console(width=100, color_system=None, force_jupyter=False)
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
        return _draw(self, Path(path))


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
        model: Any model of Transformers with a loss, dense or compressed, on the device that it will train on; one
            on the meta device is taken to train on the CPU.
        batch_size: Rows of the batch.
        seq_len: Tokens a row.
        optimizer: An optimizer of the model; it is not stepped. Default: torch's AdamW.
        inputs: A batch to estimate for in place of ``batch_size`` and ``seq_len``; only its shapes matter.
        policies: Policies to compare with the present one, by name; or a mapping from names to policies.
        autocast: Dtype of autocast, where training will use it.

    Raises:
        ValueError: If a policy is unknown, no batch can be made up for the model, or a size or dtype is out of range.
            Also if the optimizer trains none of the model's parameters, or others too. Also if the step reads entries
            of tensors, so that it cannot be tried without them.
    """
    _check(model, optimizer, autocast)
    chosen = {name: as_policy(name) for name in policies} if not isinstance(policies, Mapping) else dict(policies)
    present = activation_policy(model)
    if present not in chosen.values():
        chosen = {"now": present, **chosen}
    batch = dict(inputs) if inputs is not None else example_batch(model, batch_size, seq_len)
    mode = FakeTensorMode()
    step = FakeStep(model, optimizer or torch.optim.AdamW(model.parameters()), mode, batch, autocast)
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


def example_batch(model: PreTrainedModel, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Zeros for the inputs and labels of ``model``.

    Args:
        model: A model with a loss: its forward takes ``labels``.
        batch_size: Rows.
        seq_len: Tokens a row, for encoder and decoder; models of images take the size from their config.

    Raises:
        ValueError: If a size is not positive or more than the model takes, the model takes neither tokens nor
            pixels, or no labels.
    """
    batch = example_inputs(model, batch_size, seq_len)
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(
            f"{type(model).__name__} takes no labels, so it has no loss. Take a class with a head, such as "
            "AutoModelForMaskedLM, or pass a batch from which the model computes a loss: "
            "estimate_memory(model, inputs={...})."
        )
    one_a_row = type(model).__name__.endswith(_ONE_LABEL_A_ROW)
    batch["labels"] = torch.zeros((batch_size,) if one_a_row else (batch_size, seq_len), dtype=torch.long)
    return batch


def example_inputs(model: PreTrainedModel, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Zeros for the inputs of ``model``, without labels.

    Raises:
        ValueError: If a size is not positive or more than the model takes, or it takes neither tokens nor pixels.
    """
    for name, size in (("batch_size", batch_size), ("seq_len", seq_len)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} is not a positive integer. Use at least 1.")
    longest = getattr(model.config, "max_position_embeddings", None)
    if model.main_input_name == "input_ids" and longest is not None and seq_len > longest:
        raise ValueError(
            f"seq_len={seq_len} is more than the {longest} positions of this {type(model).__name__}. Use at most that."
        )
    if model.main_input_name == "pixel_values":
        side = model.config.image_size
        sides = (side, side) if isinstance(side, int) else tuple(side)
        return {"pixel_values": torch.zeros(batch_size, getattr(model.config, "num_channels", 3), *sides)}
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name!r}, and it is not known what a batch of it looks "
            "like. Pass one: estimate_memory(model, inputs={...}) with tensors from which it computes a loss."
        )
    return {"input_ids": torch.zeros(batch_size, seq_len, dtype=torch.long)}


class FakeStep:
    """Training steps of a fake copy; that of a model on the meta device is on the CPU."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: FakeTensorMode,
        batch: dict[str, Any],
        autocast: torch.dtype | None,
    ) -> None:
        device = _device_of(next(model.parameters()))
        self.model, self.optimizer = _fake_copy(model, optimizer, mode)
        self.model.train()
        tensors = {name: item for name, item in batch.items() if isinstance(item, Tensor)}
        self.batch = {name: mode.from_tensor(item.to(device), static_shapes=True) for name, item in tensors.items()}
        self.weights = _num_bytes([*self.model.parameters(), *self.model.buffers()])
        self.core_copies = _core_copies(self.model)
        self.autocast, self.device = autocast, device

    def loss(self) -> Tensor:
        """The loss of the batch."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            self._build_halves()
            loss: Tensor = self.model(**self.batch)[0]
        return loss

    def _build_halves(self) -> None:
        """All at once, to stay for the step, as a model with values keeps them in its cache."""
        for layer in self.model.modules():
            if isinstance(layer, TTLinear):
                vars(layer).pop("halves", None)
                vars(layer)["halves"] = _Made(layer, self.autocast or layer.core_0.dtype)

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
        with SavedBytes() as live:
            loss = self.loss()
            saved = live.now
            self.update(loss)
        activations, peak = (found + self.core_copies for found in (saved, live.peak))
        return PolicyMemory(activations=activations, peak=self.weights + self.optimizer_bytes() + peak)

    def update(self, loss: Tensor) -> None:
        """What follows the forward pass."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        states = self.optimizer.state.values()
        return _num_bytes([item for state in states for item in state.values() if isinstance(item, Tensor)])


class _Made:
    """Halves of a layer in one dtype, in the place of its method that builds them."""

    def __init__(self, layer: TTLinear, dtype: torch.dtype) -> None:
        self.layer, self.dtype, self.halves = layer, dtype, layer.halves(dtype)

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.halves if dtype == self.dtype else type(self.layer).halves(self.layer, dtype)


def _core_copies(model: nn.Module) -> int:
    """Bytes of cores that stacked halves copy for their own backward; those of fake tensors are built one by one.

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


def _fake_copy(
    model: nn.Module, optimizer: torch.optim.Optimizer, mode: FakeTensorMode
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``model`` and ``optimizer`` with tensors of ``mode`` in place of theirs; the optimizer's state starts empty.

    A fused optimizer becomes one that works through its parameters in turn, which needs as little memory.
    """
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = _fake(tensor, mode)
    fake_model, fake_optimizer = copy.deepcopy((model, optimizer), memo)
    for group in fake_optimizer.param_groups:
        if group.get("fused"):
            group.update(fused=False, foreach=False)
    return fake_model, fake_optimizer


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if tensor.is_meta:
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_device_of(tensor))
    else:
        fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _device_of(tensor: Tensor) -> torch.device:
    """Where a step with ``tensor`` would be carried out."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _draw(estimate: MemoryEstimate, path: Path) -> Path:
    """Write the picture of ``estimate`` to ``path``: a bar of parts for each policy, and a mark at the peak."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('MemoryEstimate.plot needs matplotlib: pip install "hf_comera[plots]".') from error
    names = list(estimate.policies)
    figure = Figure(figsize=(8, 0.6 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    parts = {
        "weights": [estimate.weights] * len(names),
        "gradients": [estimate.gradients] * len(names),
        "optimizer": [estimate.optimizer] * len(names),
        "activations": [policy.activations for policy in estimate.policies.values()],
    }
    ends = [0.0] * len(names)
    for label, sizes in parts.items():
        widths = [size / 1e6 for size in sizes]
        axes.barh(names, widths, left=ends, label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    peaks = [policy.peak / 1e6 for policy in estimate.policies.values()]
    axes.plot(peaks, names, "k|", markersize=16, markeredgewidth=2, label="peak")
    axes.invert_yaxis()
    axes.set_xlabel("MB")
    axes.set_title(f"Training step, estimated: {estimate.batch}", fontsize=10)
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    figure.savefig(path, dpi=150)
    return path
