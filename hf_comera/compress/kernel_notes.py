"""Notes on CUDA kernels: which layers of a model they serve, and why others are left to plain torch."""

from collections.abc import Iterator

import torch
from torch import nn

from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.modules.stamp import can_keep
from hf_comera.ops.cuda.dispatch import kernels_serve
from hf_comera.ops.cuda.halves import Half, half_refusal
from hf_comera.ops.cuda.library import kernels_refusal
from hf_comera.ops.cuda.switch import kernels_are_wanted
from hf_comera.ops.cuda.ttm_embedding import lookup_refusal
from hf_comera.ops.halves import padded_rank
from hf_comera.ops.ttm_tables import half_tables

__all__ = ["kernel_notes"]


def kernel_notes(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """What is true for ``model`` on a GPU, where layers compute in ``dtype``; nothing elsewhere."""
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
    if not can_keep(layer.train_parameters()):
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
