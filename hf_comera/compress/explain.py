"""``explain``: what the layers of a compressed model cost against dense ones, and what stands in the way of speed."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from hf_comera.compress.family_costs import FamilyCost, embedding_cost, linear_cost
from hf_comera.compress.speed_notes import speed_notes
from hf_comera.modules import CompressedLayer, FactorizedEmbedding, TTLinear, TTMEmbedding, compressed_layers
from hf_comera.ops.float32_products import uses_tf32
from hf_comera.tt.machine import CPU_THREAD, H200, H200_TF32, Machine, calibrated_cpu

__all__ = ["Explanation", "explain"]

WIDTH = 119


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One row for each family of equal layers, and notes. Print it."""

    rows: tuple[FamilyCost, ...]
    notes: tuple[str, ...]
    batch_size: int
    seq_len: int
    training: bool
    machine: Machine

    @property
    def speedup(self) -> float | None:
        """Predicted for all linear layers together; None if there are none."""
        linears = [row for row in self.rows if row.seconds is not None and row.dense_seconds is not None]
        seconds = sum(row.count * (row.seconds or 0.0) for row in linears)
        return sum(row.count * (row.dense_seconds or 0.0) for row in linears) / seconds if seconds else None

    def __str__(self) -> str:
        """The table, in at most 119 columns."""
        console = Console(width=WIDTH, record=False, no_color=True)
        with console.capture() as capture:
            console.print(self.__rich__())
            for note in self.notes:
                console.print(f"- {note}", highlight=False, markup=False)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __rich__(self) -> Table:
        """The table for ``rich.print``, without the notes."""
        table = Table(title="Cost of a layer", caption=self._caption(), show_edge=False, pad_edge=False)
        for heading in ("layers", "factors", "ranks", "path"):
            table.add_column(heading, overflow="fold")
        for heading in ("count", "FLOPs", "bytes", "predicted"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            factors = "x".join(map(str, row.in_factors)) + " -> " + "x".join(map(str, row.out_factors))
            flops = _against(row.flops, row.dense_flops)
            predicted = "" if row.speedup is None else f"{row.speedup:.1f}x"
            ranks = " ".join(map(str, row.ranks))
            costs = (flops, _against(row.bytes, row.dense_bytes), predicted)
            path = f"{row.path}, {row.extra}" if row.extra else row.path
            table.add_row(row.label, factors, ranks, path, str(row.count), *costs)
        return table

    def _caption(self) -> str:
        passes = "forward and backward" if self.training else "forward, parts of the paths cached"
        total = "" if self.speedup is None else f" All linear layers together: {self.speedup:.1f}x."
        return (
            f"{self.batch_size} x {self.seq_len} rows, {passes}; in brackets and on the right: how many times less "
            f"than dense.{total} Times are predicted for {self.machine.name} ({self.machine.source})."
        )


def explain(
    model: nn.Module, batch_size: int, seq_len: int, *, training: bool = True, machine: Machine | None = None
) -> Explanation:
    """What every family of equal compressed layers costs, along the path with the least predicted time.

    Args:
        model: A compressed model; may live on the meta device.
        batch_size: Sequences in a batch. Every layer is taken to see all tokens, which poolers and heads may not.
        seq_len: Tokens in a sequence; 1 for generation with a cache.
        training: Whether forward and backward are meant, or a forward pass with the parts of all paths cached.
        machine: What times are predicted for. Default: this CPU, calibrated, or an H200 if the model is on a GPU.

    Raises:
        ValueError: If a size is not positive.
    """
    for name, size in (("batch_size", batch_size), ("seq_len", seq_len)):
        if size < 1:
            raise ValueError(
                f"{name}={size} must be at least 1, for example explain(model, batch_size=32, seq_len=128)."
            )
    families = _families(model)
    device, dtype = _device_and_dtype(families)
    machine = machine or default_machine(device, dtype)
    rows = []
    for names, module in families:
        if isinstance(module, TTLinear):
            rows.append(linear_cost(names, module, batch_size * seq_len, training, machine, dtype))
        elif isinstance(module, TTMEmbedding | FactorizedEmbedding):
            rows.append(embedding_cost(names, module, batch_size * seq_len, training))
    times = Counter(name for row in rows for name in row.plain_names)
    rows = [replace(row, has_namesakes=any(times[name] > 1 for name in row.plain_names)) for row in rows]
    return Explanation(
        rows=tuple(rows),
        notes=speed_notes(model, rows, device, dtype, machine),
        batch_size=batch_size,
        seq_len=seq_len,
        training=training,
        machine=machine,
    )


def default_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """What a model on ``device`` is predicted for."""
    if device.type == "cuda":
        return H200_TF32 if uses_tf32() else H200
    return CPU_THREAD if device.type == "mps" else calibrated_cpu(dtype)


def _families(model: nn.Module) -> list[tuple[tuple[str, ...], CompressedLayer]]:
    """Names of equal layers, and one of them; in the order of the model."""
    families: dict[object, tuple[list[str], CompressedLayer]] = {}
    for name, module in compressed_layers(model).items():
        sizes = (*module.weight_shape(), module.in_factors, module.out_factors, module.ranks)
        group = getattr(module, "joined", None)
        together = None if group is None else (group.enabled, group.num_members, group.num_code_heads)
        wired = (together, getattr(module, "is_wide", False), getattr(module, "transposed", False))
        key = (type(module), *sizes, module.rank_activation, *wired)
        families.setdefault(key, ([], module))[0].append(name)
    return [(tuple(names), module) for names, module in families.values()]


def _device_and_dtype(
    families: Iterable[tuple[tuple[str, ...], CompressedLayer]],
) -> tuple[torch.device, torch.dtype]:
    """Where the linear layers are and what they compute in, autocast considered."""
    cores = [module.cores()[0] for _, module in families]
    if not cores:
        return torch.device("cpu"), torch.float32
    device = cores[-1].device
    kind = "cpu" if device.type == "meta" else device.type
    if torch.is_autocast_enabled(kind):
        return device, torch.get_autocast_dtype(kind)
    return device, cores[-1].dtype


def _against(compressed: int, dense: int) -> str:
    """A figure and, in brackets, how many times smaller than dense."""
    shown = f"{compressed:.0f}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if compressed >= unit:
            shown = f"{compressed / unit:.3g} {letter}"
            break
    if not dense or not compressed:
        return shown
    ratio = dense / compressed
    return f"{shown} ({ratio:.1f}x)" if ratio >= 1 else f"{shown} ({ratio:.1g}x)"
