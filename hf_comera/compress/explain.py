"""``explain``: what the layers of a compressed model cost against dense ones, and what stands in the way of speed."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from hf_comera.compress.speed_notes import fused_layers, speed_notes
from hf_comera.modules import CompressedLayer, TTLinear, compressed_layers
from hf_comera.ops.halves import padded_rank
from hf_comera.tt.planner import RULE, Product, half_products, path_products, total_cost

__all__ = ["Explanation", "FamilyCost", "explain"]

WIDTH = 119
SHOWN_NAMES = 2

_Family = tuple[tuple[str, ...], CompressedLayer]
"""Names of equal layers, and one of them."""


@dataclass(frozen=True)
class FamilyCost:
    """A family of equal layers. Costs are those of one of them; an embedding, which looks up, has none."""

    label: str
    count: int
    """How many layers."""
    factors: tuple[tuple[int, ...], tuple[int, ...]]
    """Of the input and of the output."""
    ranks: tuple[int, ...]
    path: str = ""
    """``"low-rank"`` or ``"dense"``; ``"lookup"`` of an embedding, ``"removed"`` where no rank is left."""
    extra: str = ""
    """The block that computes the layer together with others."""
    flops: int = 0
    dense_flops: int = 0
    bytes: int = 0
    """Read and written."""
    dense_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One row for each family of equal layers, and notes. Print it."""

    rows: tuple[FamilyCost, ...]
    notes: tuple[str, ...]
    batch_size: int
    seq_len: int
    training: bool

    @property
    def flops_ratio(self) -> float | None:
        """FLOPs of all dense linear layers over those of the compressed ones; None if there are none."""
        flops = sum(row.count * row.flops for row in self.rows if row.dense_flops)
        return sum(row.count * row.dense_flops for row in self.rows) / flops if flops else None

    def __str__(self) -> str:
        """The table, in at most 119 columns, and the notes."""
        console = Console(width=WIDTH, color_system=None, force_jupyter=False)
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
        for heading in ("count", "FLOPs", "bytes"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            factors = " -> ".join("x".join(map(str, side)) for side in row.factors)
            path = f"{row.path}, {row.extra}" if row.extra else row.path
            costs = _against(row.flops, row.dense_flops), _against(row.bytes, row.dense_bytes)
            table.add_row(row.label, factors, " ".join(map(str, row.ranks)), path, str(row.count), *costs)
        return table

    def _caption(self) -> str:
        passes = "forward and backward" if self.training else "forward, halves kept"
        together = "" if self.flops_ratio is None else f" FLOPs of all linear layers: {self.flops_ratio:.1f}x less."
        return (
            f"{self.batch_size} x {self.seq_len} rows, {passes}; counted, not timed; in brackets: how many times less "
            f"than dense.{together} Path: {RULE}."
        )


def explain(model: nn.Module, batch_size: int, seq_len: int, *, training: bool = True) -> Explanation:
    """What every family of equal compressed layers costs along the path that it takes, and what is off and why.

    Args:
        model: A compressed model; may live on the meta device.
        batch_size: Sequences in a batch. Every layer is taken to see all tokens, which poolers and heads may not.
        seq_len: Tokens in a sequence; 1 for generation with a cache.
        training: Whether forward and backward are meant, or a forward pass with all that is kept in evaluation.

    Raises:
        ValueError: If a size is not positive.
    """
    for name, size in (("batch_size", batch_size), ("seq_len", seq_len)):
        if size < 1:
            raise ValueError(
                f"{name}={size} must be at least 1, for example explain(model, batch_size=32, seq_len=128)."
            )
    fused = fused_layers(model)
    families = _families(model, fused)
    device, dtype = _device_and_dtype(families)
    rows = [
        replace(
            _cost(label, names, layer, batch_size * seq_len, dtype, training=training),
            extra=fused.get(layer, "") if isinstance(layer, TTLinear) else "",
        )
        for label, (names, layer) in zip(_labels(families), families, strict=True)
    ]
    notes = speed_notes(model, rows, device, dtype)
    return Explanation(rows=tuple(rows), notes=notes, batch_size=batch_size, seq_len=seq_len, training=training)


def _cost(
    label: str, names: tuple[str, ...], layer: CompressedLayer, rows: int, dtype: torch.dtype, *, training: bool
) -> FamilyCost:
    """One of the equal layers, without bias; training builds the halves, in evaluation they are at hand."""
    family = FamilyCost(label, len(names), (layer.in_factors, layer.out_factors), layer.ranks)
    if not isinstance(layer, TTLinear):
        return replace(family, path="removed" if getattr(layer, "is_removed", False) else "lookup")
    inputs, outputs = layer.in_features, layer.out_features
    dense_flops, dense_bytes = total_cost([Product(rows, inputs, outputs, dtype)], training=training)
    family = replace(family, dense_flops=dense_flops, dense_bytes=dense_bytes)
    if layer.is_removed:
        return replace(family, path="removed")
    middle, rank = len(layer.in_factors) - 1, padded_rank(layer.middle_rank)
    products = path_products(layer.prefers_dense, (rows, inputs, rank, outputs), dtype, kept=not training)
    if training:
        chain = torch.promote_types(layer.cores()[0].dtype, torch.float32)
        products += half_products(layer.in_factors, (*layer.ranks[:middle], rank), chain)
        products += half_products(layer.out_factors[::-1], (*layer.ranks[middle + 1 :][::-1], rank), chain)
    flops, num_bytes = total_cost(products, training=training)
    path = "dense" if layer.prefers_dense else "low-rank"
    return replace(family, path=path, flops=flops, bytes=num_bytes)


def _families(model: nn.Module, fused: dict[TTLinear, str]) -> list[_Family]:
    """In the order of the model."""
    families: dict[object, tuple[list[str], CompressedLayer]] = {}
    for name, module in compressed_layers(model).items():
        sizes = (*module.weight_shape(), module.in_factors, module.out_factors, module.ranks)
        wired = fused.get(module, ""), getattr(module, "transposed", False)  # type: ignore[call-overload]
        families.setdefault((type(module), *sizes, *wired), ([], module))[0].append(name)
    return [(tuple(names), module) for names, module in families.values()]


def _labels(families: list[_Family]) -> list[str]:
    """The last two parts of the names without numbers; the first names whole, where another family has those too."""
    plain = [
        dict.fromkeys(".".join(part for part in name.split(".") if not part.isdigit()) for name in names)
        for names, _ in families
    ]
    times, labels = Counter(name for group in plain for name in group), []
    for group, (names, _) in zip(plain, families, strict=True):
        if any(times[name] > 1 for name in group) or "" in group:
            more = len(names) - SHOWN_NAMES
            labels.append(", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else ""))
        else:
            labels.append(", ".join(dict.fromkeys(".".join(name.split(".")[-2:]) for name in group)))
    return labels


def _device_and_dtype(families: list[_Family]) -> tuple[torch.device, torch.dtype]:
    """Where the linear layers are and what they compute in, autocast considered."""
    if not families:
        return torch.device("cpu"), torch.float32
    core = families[-1][1].cores()[0]
    kind = "cpu" if core.device.type == "meta" else core.device.type
    return core.device, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else core.dtype


def _against(compressed: int, dense: int) -> str:
    """A figure and, in brackets, how many times smaller than dense; nothing where nothing is counted."""
    if not dense:
        return ""
    shown = f"{compressed:.0f}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if compressed >= unit:
            shown = f"{compressed / unit:.3g} {letter}"
            break
    return f"{shown} ({dense / compressed:.1f}x)" if compressed else shown
