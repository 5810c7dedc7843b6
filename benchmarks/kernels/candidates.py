"""What is timed of chains of cores: halves of many layers, and lookups, with and without gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.ops import ttm_lookup, use_kernels
from hf_comera.ops.halves import Side, model_halves
from loop.measure import DENSE

__all__ = ["CHAIN_OPS", "KERNEL", "TOKENS", "TORCH"]

TORCH, KERNEL = "torch", "kernel"
Candidates = dict[str, Callable[[], Tensor]]


def by_torch_and_kernel(compute: Callable[[], Tensor]) -> Candidates:
    """``compute`` with kernels switched off and on."""

    def switched(wanted: bool) -> Tensor:
        use_kernels(wanted)
        try:
            return compute()
        finally:
            use_kernels(False)

    return {TORCH: lambda: switched(False), KERNEL: lambda: switched(True)}


def halves(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Candidates:
    """Both halves of equal layers, whose cores are in float32; the last one is returned."""
    sides, _ = both_sides(shape, dtype, device)
    return by_torch_and_kernel(lambda: model_halves(sides)[-1][-1].detach())


def halves_with_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Candidates:
    """The same, and the gradients of all cores; that of one is returned."""
    sides, cores = both_sides(shape, dtype, device)
    grads = [torch.randn(rank, side.features, device=device).to(dtype) for side in sides for rank in side.ranks()]

    def compute() -> Tensor:
        return torch.autograd.grad([half for each in model_halves(sides) for half in each], cores, grads)[1]

    return by_torch_and_kernel(compute)


def both_sides(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[list[Side], list[Tensor]]:
    """The left and the right sides of equal layers, and all their cores."""
    num_layers, in_features, out_features, rank = shape
    layers = [TTLinear(in_features, out_features, ranks=rank, device=device) for _ in range(num_layers)]
    num_in, no_gates = len(layers[0].in_factors), [[] for _ in layers]
    sides = [
        Side([layer.cores()[:num_in] for layer in layers], no_gates, True, in_features, dtype),
        Side([layer.cores()[num_in:] for layer in layers], no_gates, False, out_features, dtype),
    ]
    return sides, [core for side in sides for core in side.tensors()]


def lookup(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Candidates:
    """Embedding rows, the half tables made anew."""
    ids, layer, table = embeddings(shape, dtype, device)
    compute = by_torch_and_kernel(lambda: rows_of(layer, ids).detach())
    return {DENSE: lambda: embedding(ids, table).detach()} | compute


def lookup_with_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Candidates:
    """The same, and the gradients of all cores or of the table; that of one core is returned."""
    ids, layer, table = embeddings(shape, dtype, device)
    grad = torch.randn(ids.shape[0], layer.embedding_dim, device=device).to(dtype)

    def compute() -> Tensor:
        return torch.autograd.grad(rows_of(layer, ids), layer.cores(), grad)[1]

    return {DENSE: lambda: torch.autograd.grad(embedding(ids, table), table, grad)[0]} | by_torch_and_kernel(compute)


def embeddings(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, TTMEmbedding, Tensor]:
    """Ids of which the small ones come often, as words do, the layer, and a dense table of its size."""
    num_ids, vocabulary, hidden, rank = shape
    ids = ((vocabulary + 1.0) ** torch.rand(num_ids, device=device) - 1).long().clamp(max=vocabulary - 1)
    layer = TTMEmbedding(vocabulary, hidden, ranks=rank, device=device, dtype=dtype)
    return ids, layer, torch.randn(vocabulary, hidden, device=device, dtype=dtype, requires_grad=True)


def rows_of(layer: TTMEmbedding, ids: Tensor) -> Tensor:
    """What the layer does in training."""
    return ttm_lookup(ids, layer.cores(), layer.num_embeddings, layer.embedding_dim)


LAYERS, TOKENS = ("layers", "in", "out", "rank"), ("tokens", "in", "out", "rank")
BERT_LAYERS = [(24, 768, 768, 30), (12, 768, 3072, 30), (24, 1024, 4096, 64)]
BERT_WORDS = [(4096, 30522, 768, 30)]
# what is timed -> names of its sizes, how it is made, sizes, sizes for the emulation
CHAIN_OPS: dict[str, tuple[tuple[str, ...], Callable[..., Candidates], list[Any], list[Any]]] = {
    "halves": (LAYERS, halves, BERT_LAYERS, [(2, 64, 96, 16)]),
    "halves and gradients": (LAYERS, halves_with_gradients, BERT_LAYERS, [(2, 64, 96, 16)]),
    "lookup": (TOKENS, lookup, BERT_WORDS, [(40, 57, 24, 4)]),
    "lookup and gradients": (TOKENS, lookup_with_gradients, BERT_WORDS, [(40, 57, 24, 4)]),
}
