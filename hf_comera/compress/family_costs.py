"""``FamilyCost``: FLOPs, bytes and predicted seconds of a layer of a family of equal ones, and of its dense twin."""

import re
from dataclasses import dataclass

import torch

from hf_comera.modules import FactorizedEmbedding, TTLinear, TTMEmbedding
from hf_comera.modules.wide_hidden import is_wide_enough
from hf_comera.ops.halves import padded_rank
from hf_comera.ops.ttm_tables import half_tables
from hf_comera.ops.wide_code import takes_kernels_like
from hf_comera.tt.machine import Machine
from hf_comera.tt.path import ContractionPath, candidate_paths
from hf_comera.tt.products import Cost, Product, predicted_seconds, total_cost

__all__ = ["AS_CODES", "IN_A_KERNEL", "FamilyCost", "embedding_cost", "linear_cost"]

REMOVED = "removed"
IN_A_KERNEL = "hidden in a kernel"
AS_CODES = "attends as codes"
SHOWN_NAMES = 2


@dataclass(frozen=True, kw_only=True)
class FamilyCost:
    """A family of equal layers. Costs are those of one of them."""

    layers: tuple[str, ...]
    has_namesakes: bool = False
    """Whether layers of another family have the same names but for numbers."""
    in_size: int
    out_size: int
    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: int
    """Rows of the input, or ids that are looked up."""
    path: str
    """Label of the contraction path; how many lookups of an embedding, ``"removed"`` where no rank is left."""
    extra: str = ""
    """What the layer does together with others: shares a product, or leaves its output unwritten."""
    flops: int
    dense_flops: int
    bytes: int
    """Read and written."""
    dense_bytes: int
    seconds: float | None = None
    """Predicted; None for embeddings, whose time is that of scattered reads."""
    dense_seconds: float | None = None
    forbidden_path: str | None = None
    """The path that would take less time if there were no rank activation."""

    @property
    def count(self) -> int:
        """How many layers."""
        return len(self.layers)

    @property
    def speedup(self) -> float | None:
        """Predicted time of a dense layer over that of one of these."""
        return self.dense_seconds / self.seconds if self.seconds and self.dense_seconds else None

    @property
    def label(self) -> str:
        """The last two parts of the names, without numbers and repetitions; with namesakes the first names whole."""
        if not self.has_namesakes:
            short = dict.fromkeys(".".join(name.split(".")[-2:]) for name in self.plain_names)
            return ", ".join(short) or self.layers[0]
        more = self.count - SHOWN_NAMES
        return ", ".join(self.layers[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The names without numbers, each once."""
        plain = (re.sub(r"(^|\.)\d+(?=\.|$)", "", name).lstrip(".") for name in self.layers)
        return tuple(dict.fromkeys(filter(None, plain)))


def linear_cost(
    names: tuple[str, ...], layer: TTLinear, rows: int, training: bool, machine: Machine, dtype: torch.dtype
) -> FamilyCost:
    """One TT linear and the dense layer that it replaces, both without bias."""
    dense = Product("apply", "y", rows, layer.in_features, layer.out_features, dtype)
    dense_cost = total_cost((dense, *dense.gradients()) if training else (dense,))
    best, path = (None, None) if layer.is_removed else _paths(layer, rows, training, machine, dtype)
    cost = Cost() if path is None else path.cost()
    return FamilyCost(
        layers=names,
        in_size=layer.in_features,
        out_size=layer.out_features,
        in_factors=layer.in_factors,
        out_factors=layer.out_factors,
        ranks=layer.ranks,
        rows=rows,
        path=REMOVED if path is None else path.label,
        extra=_together(layer, rows, dtype) if path is not None and path.kind == "two-sided" else "",
        flops=2 * cost.multiplications,
        dense_flops=2 * dense_cost.multiplications,
        bytes=cost.bytes,
        dense_bytes=dense_cost.bytes,
        seconds=None if path is None else path.seconds,
        dense_seconds=None if path is None else predicted_seconds(dense, machine, training),
        forbidden_path=best.label if layer.rank_activation and best is not path and best else None,
    )


def _together(layer: TTLinear, rows: int, dtype: torch.dtype) -> str:
    """What the layer does together with others on the two-sided path."""
    joined = "joined" if layer.has_siblings and layer.joined is not None and layer.joined.enabled else ""
    return ", ".join(filter(None, (joined, _unwritten(layer, rows, dtype))))


def _unwritten(layer: TTLinear, rows: int, dtype: torch.dtype) -> str:
    """How the output is not written, if the layer is the first of a feed-forward block, or feeds attention."""
    core, rank = layer.cores()[0], padded_rank(layer.middle_rank)
    on_cpu = core.device.type in ("cpu", "meta")
    if layer.joined is not None and layer.joined.num_code_heads is not None:
        return AS_CODES if layer.code_heads(rows) is not None else ""
    if not layer.is_wide or not is_wide_enough(rows, layer.out_features):
        return ""
    if takes_kernels_like(core.new_empty(rank, 0, dtype=dtype)):
        return IN_A_KERNEL
    return "hidden in chunks" if on_cpu else ""


def _paths(
    layer: TTLinear, rows: int, training: bool, machine: Machine, dtype: torch.dtype
) -> tuple[ContractionPath, ContractionPath]:
    """The path with the least predicted time, and the one that the layer takes.

    A training step is charged with its share of what builds the halves.
    """
    taken = layer.path(rows, dtype, training=training)
    paths = candidate_paths(taken.problem._replace(machine=machine, halves_cached=not training))
    return paths[0], next(path for path in paths if path.label == taken.label)


def embedding_cost(
    names: tuple[str, ...], layer: TTMEmbedding | FactorizedEmbedding, ids: int, training: bool
) -> FamilyCost:
    """One embedding, all ids taken to be different, and a dense table, whose gradient is as large as the table."""
    num_embeddings, embedding_dim = layer.weight_shape()
    row_bytes = embedding_dim * layer.cores()[0].dtype.itemsize
    dense_bytes = 2 * ids * row_bytes + training * (ids + num_embeddings) * row_bytes
    is_removed = isinstance(layer, TTMEmbedding) and layer.is_removed
    flops, num_bytes = (0, 0) if is_removed else _lookup_cost(layer, ids, training)
    return FamilyCost(
        layers=names,
        in_size=num_embeddings,
        out_size=embedding_dim,
        in_factors=layer.in_factors,
        out_factors=layer.out_factors,
        ranks=layer.ranks,
        rows=ids,
        path=REMOVED if is_removed else f"lookup of {ids:,}",
        flops=flops,
        dense_flops=0,
        bytes=num_bytes,
        dense_bytes=dense_bytes,
    )


def _lookup_cost(layer: TTMEmbedding | FactorizedEmbedding, ids: int, training: bool) -> tuple[int, int]:
    """FLOPs and bytes: of a factorized embedding those of its narrow rows, and of the projection of these."""
    if isinstance(layer, TTMEmbedding):
        return _train_lookup_cost(layer, ids, training)
    itemsize, width = layer.projection.dtype.itemsize, layer.width
    projection = Product("apply", "y", ids, width, layer.embedding_dim, layer.projection.dtype)
    cost = total_cost((projection, *projection.gradients()) if training else (projection,))
    narrow = (2 * ids + training * (ids + layer.num_embeddings)) * width * itemsize  # the gradient is a whole table
    flops, num_bytes = (
        (0, narrow) if layer.train_of_table is None else _train_lookup_cost(layer.train_of_table, ids, training)
    )
    return flops + 2 * cost.multiplications, num_bytes + cost.bytes


def _train_lookup_cost(layer: TTMEmbedding, ids: int, training: bool) -> tuple[int, int]:
    """FLOPs and bytes: both half tables, then a gathered piece of each and a small product for every id."""
    tables = half_tables([torch.empty_like(core, device="meta") for core in layer.cores()])
    (_, hidden, rank), columns, split = tables.left.shape, tables.right.shape[2], tables.split
    left = zip(tables.prefixes[1:], tables.cores[1:split], strict=True)
    right = zip(tables.suffixes[:-1], tables.cores[split:-1], strict=True)
    multiplications = sum(prefix.numel() * core.shape[0] for prefix, core in left)
    multiplications += sum(suffix.numel() * core.shape[-1] for suffix, core in right)
    multiplications += ids * hidden * rank * columns
    chain_bytes = sum(each.nbytes for each in (*tables.cores, *tables.prefixes, *tables.suffixes))
    gathered = ids * rank * (hidden + columns) * tables.left.dtype.itemsize
    row_bytes = ids * layer.weight_shape()[1] * layer.cores()[0].dtype.itemsize
    forward = chain_bytes + 2 * gathered + row_bytes  # pieces are written once and read once
    if not training:
        return 2 * multiplications, forward
    # tables and pieces are made again; the gradients of rows are read, those of pieces and of tables written and read
    backward = chain_bytes + 2 * gathered + row_bytes + 2 * gathered + 2 * chain_bytes
    return 6 * multiplications, forward + backward
