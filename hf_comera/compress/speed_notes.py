"""What is off in a compressed model and why, each with what to do: the one place where such notes are collected."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_comera.compress.kernel_notes import kernel_notes
from hf_comera.modules import TiedHead, TTLinear
from hf_comera.modules.block import Block
from hf_comera.modules.fast_dropout import FastDropout
from hf_comera.modules.head_and_loss import LANGUAGE_MODELS, HeadAndLoss
from hf_comera.modules.latent_attention import LatentAttention
from hf_comera.ops.cuda.build import find_nvcc
from hf_comera.ops.kept_bits import WORTH_BITS

if TYPE_CHECKING:
    from hf_comera.compress.explain import FamilyCost

__all__ = ["fused_layers", "speed_notes"]


def speed_notes(
    model: nn.Module, rows: Sequence["FamilyCost"], device: torch.device, dtype: torch.dtype
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


def _about_paths(model: nn.Module, rows: Sequence["FamilyCost"]) -> Iterator[str]:
    if not rows:
        yield (
            "No layer is in tensor-train form. Compress the model with get_comera_model(model, ComeraConfig(rank=30))."
        )
    dense = [row.label for row in rows if row.path == "dense"]
    if dense:
        yield (
            f"The dense matrix, built from the train, is the soonest way: {'; '.join(dense)}. At these ranks a train "
            "saves parameters at best, not time; lower the rank for speed."
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
        yield f"Training, {fast} dropouts draw four entries at a time where they have {WORTH_BITS:,} or more."
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
