"""What is off in a compressed model and why, each with what to do: the one place where such notes are collected."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_comera.compress.kernel_notes import kernel_notes
from hf_comera.modules import TiedHead, TTLinear
from hf_comera.modules.fast_dropout import FastDropout
from hf_comera.modules.head_and_loss import LANGUAGE_MODELS, HeadAndLoss
from hf_comera.modules.joined import WORTH_A_CACHE
from hf_comera.modules.wide_hidden import is_wide_enough
from hf_comera.ops.halves import padded_rank
from hf_comera.ops.kept_bits import WORTH_BITS
from hf_comera.ops.kernel_build import find_nvcc
from hf_comera.ops.wide_code import takes_kernels_like
from hf_comera.ops.wide_code_kernels import MAX_RANK, WIDE_ACTIVATIONS

if TYPE_CHECKING:
    from hf_comera.compress.explain import FamilyCost

__all__ = ["speed_notes", "works_with"]

IN_A_KERNEL = "hidden in a kernel"
AS_CODES = "attends as codes"


def speed_notes(
    model: nn.Module, rows: Sequence["FamilyCost"], device: torch.device, dtype: torch.dtype
) -> tuple[str, ...]:
    """All notes that apply, the most general first."""
    return (
        *_about_the_machine(device, dtype),
        *kernel_notes(model, device, dtype),
        *_about_blocks(model, rows, device),
        *_about_dropout(model, device),
        *_about_head_and_loss(model),
        *_about_paths(model, rows),
    )


def works_with(layer: TTLinear, rows: int, dtype: torch.dtype) -> str:
    """What a layer on the low-rank path does together with others: shares a product, leaves its output unwritten."""
    group, core = layer.joined, layer.cores()[0]
    joined = "joined" if group is not None and layer.has_siblings and group.enabled else ""
    unwritten = ""
    if group is not None and group.num_code_heads is not None:
        unwritten = AS_CODES if layer.code_heads(rows) is not None else ""
    elif layer.is_wide and is_wide_enough(rows, layer.out_features):
        if takes_kernels_like(core.new_empty(padded_rank(layer.middle_rank), 0, dtype=dtype)):
            unwritten = IN_A_KERNEL
        elif core.device.type in ("cpu", "meta"):
            unwritten = "hidden in chunks"
    return ", ".join(filter(None, (joined, unwritten)))


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


def _about_blocks(model: nn.Module, rows: Sequence["FamilyCost"], device: torch.device) -> Iterator[str]:
    if any(IN_A_KERNEL in row.extra for row in rows):
        yield (
            f"A hidden layer stays in a kernel if its activation is {', '.join(WIDE_ACTIVATIONS)}, gated or not, and "
            f"the rank of the layer behind at most {MAX_RANK}; else it is written out."
        )
    joined = (getattr(module, "joined", None) for module in model.modules() if isinstance(module, TTLinear))
    groups = list(dict.fromkeys(group for group in joined if group is not None))
    off = [group for group in groups if not group.enabled]
    if off:
        yield (
            f"{len(off)} groups of siblings are no longer joined: they were called with different inputs, so codes "
            "made for all of them were made in vain."
        )
    if any(AS_CODES in row.extra for row in rows):
        yield f"Outputs of layers marked {AS_CODES!r} are never written: they take less than the table counts."
    attentions = [group for group in groups if group.num_members * group.num_parts == len(("query", "key", "value"))]
    refusals = Counter(filter(None, (group.code_refusal() for group in attentions)))
    for refusal, count in refusals.items():
        yield f"{count} of {len(attentions)} attention layers do not attend to codes: {refusal}."
    if attentions and not refusals and device.type == "cuda":
        yield "Attention takes codes on a CPU only: on a GPU that has not been measured."
    elif cached := [group for group in attentions if group.has_cache and group.code_refusal() is None]:
        codes, wide = (sum(numbers) for numbers in zip(*(group.cached_numbers() for group in cached), strict=True))
        tokens = math.ceil(WORTH_A_CACHE * 2 * len(cached) / wide)
        yield (
            f"In generation {len(cached)} attention layers cache {codes:,} numbers a token instead of {wide:,}, where "
            f"prompts have {tokens:,} tokens or more, all texts of the batch together."
        )


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
