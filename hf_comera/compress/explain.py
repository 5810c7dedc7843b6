"""``explain``: the cost of a compressed model's layers against dense ones, and the obstacles to speed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from hf_comera.modules import CompressedLayer, TiedHead, TTLinear, TTMEmbedding, compressed_layers
from hf_comera.modules.block import Block
from hf_comera.modules.fast_dropout import FastDropout
from hf_comera.modules.halves_cache import can_cache
from hf_comera.modules.head_and_loss import LANGUAGE_MODELS, HeadAndLoss
from hf_comera.modules.latent_attention import LatentAttention
from hf_comera.ops.bit_dropout import MIN_NUMEL
from hf_comera.ops.cuda.build import find_nvcc
from hf_comera.ops.cuda.dispatch import kernels_serve
from hf_comera.ops.cuda.halves import Half, half_refusal
from hf_comera.ops.cuda.library import kernels_refusal
from hf_comera.ops.cuda.switch import kernels_are_wanted
from hf_comera.ops.cuda.ttm_embedding import lookup_refusal
from hf_comera.ops.halves import padded_rank
from hf_comera.ops.ttm_embedding import half_tables
from hf_comera.tt.planner import RULE, Product, half_products, path_products, total_cost

__all__ = ["Explanation", "LayerGroupCost", "explain", "fused_layers", "kernel_notes", "speed_notes"]

WIDTH = 119
SHOWN_NAMES = 2

_Family = tuple[tuple[str, ...], CompressedLayer]
"""Names of equal layers, and one of them."""


@dataclass(frozen=True)
class LayerGroupCost:
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

    rows: tuple[LayerGroupCost, ...]
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
    """The cost of every group of equal compressed layers along the path that it takes, and each fast path that is off.

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
) -> LayerGroupCost:
    """One of the equal layers, without bias; training builds the halves, in evaluation they are at hand."""
    family = LayerGroupCost(label, len(names), (layer.in_factors, layer.out_factors), layer.ranks)
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


def speed_notes(
    model: nn.Module, rows: Sequence["LayerGroupCost"], device: torch.device, dtype: torch.dtype
) -> tuple[str, ...]:
    """All notes that apply, the most general first."""
    return (
        *_about_the_machine(device, dtype),
        *kernel_notes(model, device, dtype),
        *_about_blocks(model),
        *_about_dropout(model, device),
        *_about_head_and_loss(model),
        *_about_paths(model, rows),
    )


def fused_layers(model: nn.Module) -> dict[TTLinear, str]:
    """The layers that a block computes together with others, and the name of the block."""
    return {
        layer: module.title
        for module in model.modules()
        if isinstance(module, Block) and module.is_complete and module.refusal() is None
        for layer in module.fused_layers()
    }


def _about_the_machine(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "No GPU: torch finds no CUDA device, so the model runs on the CPU."
    elif device.type != "cuda":
        yield f"A GPU is there, but the model is on {device.type!r}: model.to('cuda') moves it."
    if find_nvcc() is None:
        yield "No nvcc found: CUDA sources cannot be built, so operators run in plain torch."
    if dtype == torch.float64:
        yield "dtype float64: twice the bytes of float32 and half its speed at best; models train in float32 or less."
    elif dtype == torch.float32 and device.type == "cuda":
        yield "dtype float32: bfloat16 (bf16=True of the Trainer) multiplies several times as fast on a GPU."


def _about_paths(model: nn.Module, rows: Sequence["LayerGroupCost"]) -> Iterator[str]:
    if not rows:
        yield (
            "No layer is in tensor-train form. Compress the model with get_comera_model(model, ComeraConfig(rank=30))."
        )
    dense = [row.label for row in rows if row.path == "dense"]
    if dense:
        yield (
            f"The dense matrix, built from the cores, is the fastest way: {'; '.join(dense)}. At these ranks a tensor "
            "train saves parameters at best, not time; lower the rank for speed."
        )
    slow = [row.label for row in rows if row.path == "low-rank" and row.flops > row.dense_flops]
    if slow:
        yield (
            f"More FLOPs than dense: {'; '.join(slow)}. There are too few rows to make up for building the halves. "
            "More rows in a batch, lower ranks, or exclude_modules."
        )
    heads = [name for name, module in model.named_modules() if isinstance(module, TiedHead)]
    if heads:
        yield f"Not in the table: {', '.join(heads)}, which multiplies with the table of the embedding."


def _about_blocks(model: nn.Module) -> Iterator[str]:
    blocks = [module for module in model.modules() if isinstance(module, Block) and module.is_complete]
    refusals = Counter((block.title, reason) for block in blocks if (reason := block.refusal()) is not None)
    for (title, reason), count in refusals.items():
        total = sum(block.title == title for block in blocks)
        yield f"{count} of {total} modules do without {title}: {reason}."
    fused = fused_layers(model)
    layers = {layer: name for name, layer in model.named_modules() if isinstance(layer, TTLinear)}
    alone = [name for layer, name in layers.items() if layer not in fused and not layer.is_removed]
    if alone and not refusals:
        others = f" and {len(alone) - 1} others" if len(alone) > 1 else ""
        yield f"Layers that no block serves compute alone: {alone[0]}{others}."
    attentions: list[Any] = [block for block in blocks if isinstance(block, LatentAttention)]
    caching = [block for block in attentions if getattr(block, "is_causal", False)]
    if caching and not any(title == LatentAttention.title for title, _ in refusals):
        numbers = [block.cached_numbers() for block in caching]
        latents, wide = map(sum, zip(*numbers, strict=True))
        yield f"In generation {len(caching)} attention layers cache {latents:,} numbers a token instead of {wide:,}."
    if fused:
        yield "Layers in a block never write their output, or only a part of it: they take less than the table counts."


def _about_dropout(model: nn.Module, device: torch.device) -> Iterator[str]:
    drawing = [module for module in model.modules() if isinstance(module, nn.Dropout) and 0 < module.p < 1]
    fast, on_cpu = sum(isinstance(module, FastDropout) for module in drawing), device.type in ("cpu", "meta")
    if fast and on_cpu:
        yield f"Training, {fast} dropouts draw four entries at a time where they have {MIN_NUMEL:,} or more."
    elif fast:
        yield f"Training, {fast} dropouts are torch's: drawing several entries at a time is for a CPU."
    if len(drawing) > fast and on_cpu:
        yield (
            f"{len(drawing) - fast} dropouts draw one entry at a time, in one thread: they are of a class of their "
            "own, or the model was not made by get_comera_model. nn.Dropout itself would be faster, or a rate of 0."
        )


def _about_head_and_loss(model: nn.Module) -> Iterator[str]:
    if not isinstance(model, PreTrainedModel) or not type(model).__name__.endswith(LANGUAGE_MODELS):
        return
    block = HeadAndLoss.of(model)
    if isinstance(block, str):
        yield f"All logits exist while it trains, also of tokens without a label: {block}."
    elif "head_and_loss" not in vars(model):
        yield "Head and loss as one block is off: set_head_and_loss(model) computes logits for labelled tokens only."


def kernel_notes(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Notes on ``model`` on a GPU, where layers compute in ``dtype``; nothing elsewhere."""
    if device.type == "cuda" and not kernels_are_wanted():
        yield "CUDA kernels are off, since none has run on a GPU yet: hf_comera.ops.use_kernels() turns them on."
    elif device.type == "cuda" and (reason := kernels_refusal(device)):
        yield f"CUDA kernels cannot run: {reason}. Operators run in plain torch."
    elif kernels_serve(device):
        layers = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, TTLinear | TTMEmbedding) and not module.is_removed
        ]
        yield from _about_halves([(name, layer) for name, layer in layers if isinstance(layer, TTLinear)], dtype)
        yield from _about_lookups([(name, layer) for name, layer in layers if isinstance(layer, TTMEmbedding)])


def _about_halves(layers: list[tuple[str, TTLinear]], dtype: torch.dtype) -> Iterator[str]:
    refused = {name: reason for name, layer in layers if (reason := _halves_refusal(layer, dtype))}
    if len(refused) < len(layers):
        yield f"CUDA kernels make the halves of {len(layers) - len(refused)} layers in one call, and their gradients."
    yield from _left_to_torch("Halves", refused)


def _about_lookups(layers: list[tuple[str, TTMEmbedding]]) -> Iterator[str]:
    refused = {name: reason for name, layer in layers if (reason := _lookup_refusal(layer))}
    taken = [name for name, _ in layers if name not in refused]
    if taken:
        yield f"CUDA kernels look up the rows of {', '.join(taken)}; heads tied to them stay in plain torch."
    yield from _left_to_torch("Lookups", refused)


def _left_to_torch(what: str, refused: dict[str, str]) -> Iterator[str]:
    """One note for each reason."""
    for reason in dict.fromkeys(refused.values()):
        names = [name for name, other in refused.items() if other == reason]
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        yield f"{what} of {names[0]}{others} are made in plain torch, not by CUDA kernels: {reason}."


def _halves_refusal(layer: TTLinear, dtype: torch.dtype) -> str | None:
    if not can_cache(layer.tt_parameters()):
        return "their cores are sharded, or computed from something else"
    cores, gates = ([each.detach().contiguous() for each in part] for part in (layer.cores(), layer.rank_gates()))
    num_in = len(layer.in_factors)
    rank = padded_rank(layer.ranks[num_in - 1])
    left = Half(cores[:num_in], True, layer.in_features, rank, gates[:num_in])
    right = Half(cores[num_in:], False, layer.out_features, rank, gates[num_in:])
    return half_refusal(left, dtype) or half_refusal(right, dtype)


@torch.no_grad()
def _lookup_refusal(layer: TTMEmbedding) -> str | None:
    tables = half_tables(layer.gated_cores())
    ids = torch.empty(0, dtype=torch.int64, device=tables.left.device)
    return lookup_refusal(ids, tables.left, tables.right, layer.cores()[0].dtype)
