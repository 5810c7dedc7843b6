"""Notes on what keeps a compressed model from being fast here, each with the reason and what to do."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_comera.compress.family_costs import AS_CODES, IN_A_KERNEL, FamilyCost
from hf_comera.compress.kernel_notes import kernel_notes
from hf_comera.modules import TiedHead, TTLinear
from hf_comera.modules.fast_dropout import FastDropout
from hf_comera.modules.head_and_loss import LANGUAGE_MODELS, HeadAndLoss
from hf_comera.modules.joined import WORTH_A_CACHE
from hf_comera.ops.cuda.build import find_nvcc
from hf_comera.ops.cuda.tiled_mlp import MAX_RANK
from hf_comera.ops.kept_bits import WORTH_BITS
from hf_comera.ops.wide_input import WIDE_ACTIVATIONS
from hf_comera.tt.machine import Machine

__all__ = ["speed_notes"]

LARGE = 512  # a product of this size in all directions runs at full speed


def speed_notes(
    model: nn.Module, rows: Sequence[FamilyCost], device: torch.device, dtype: torch.dtype, machine: Machine
) -> tuple[str, ...]:
    """All notes that apply, the most general first."""
    return (
        *_about_the_machine(device),
        *kernel_notes(model, device, dtype),
        *_about_the_dtype(device, dtype, machine),
        *_about_hidden_layers(rows),
        *_about_siblings(model, rows, device),
        *_about_dropout(model, device),
        *_about_head_and_loss(model),
        *_about_the_model(model, rows),
    )


def _about_the_machine(device: torch.device) -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "No GPU: torch finds no CUDA device, so the model runs on the CPU."
    elif device.type != "cuda":
        yield f"A GPU is there, but the model is on {device.type!r}: model.to('cuda') moves it."
    if find_nvcc() is None:
        yield "No nvcc found: CUDA sources cannot be built, so operators run in plain torch."


def _about_the_dtype(device: torch.device, dtype: torch.dtype, machine: Machine) -> Iterator[str]:
    name = str(dtype).removeprefix("torch.")
    rate, single = (machine.of(each).rate(LARGE, LARGE, LARGE) for each in (dtype, torch.float32))
    if dtype == torch.float64:
        yield "dtype float64: twice the bytes of float32 and half its speed at best; models train in float32 or less."
    elif dtype.itemsize < 4 and rate <= single:
        yield f"dtype {name}: products run no faster than in float32 here ({rate / single:.1f}x); it saves bytes only."
    elif dtype == torch.float32 and device.type == "cuda":
        gain = machine.of(torch.bfloat16).flops / single
        yield f"dtype float32: bfloat16 (bf16=True of the Trainer) multiplies up to {gain:.0f}x faster."


def _about_head_and_loss(model: nn.Module) -> Iterator[str]:
    if not isinstance(model, PreTrainedModel) or not type(model).__name__.endswith(LANGUAGE_MODELS):
        return
    block = HeadAndLoss.of(model)
    if isinstance(block, str):
        yield f"All logits exist while it trains, also of tokens without a label: {block}."
    elif "head_and_loss" not in vars(model):
        yield "Head and loss as one block is off: set_head_and_loss(model) computes logits for labelled tokens only."


def _about_the_model(model: nn.Module, rows: Sequence[FamilyCost]) -> Iterator[str]:
    if not rows:
        yield (
            "No layer is in tensor-train form. Compress the model with get_comera_model(model, ComeraConfig(rank=30))."
        )
    slow = [row for row in rows if row.speedup is not None and row.speedup < 1 and row.path != "dense"]
    if slow:
        yield (
            f"No faster than dense: {'; '.join(map(_named, slow))}. {slow[0].rows:,} rows of these sizes are too "
            "little work for these ranks. More rows in a batch, lower ranks, or exclude_modules."
        )
    dense = [row for row in rows if row.path == "dense"]
    if dense:
        yield (
            f"The dense matrix, built from the train, is the soonest way: {'; '.join(map(_named, dense))}. At these "
            "ranks a train saves parameters, not time; lower the rank for speed."
        )
    forbidden = [row for row in rows if row.forbidden_path is not None]
    if forbidden:
        paths = "; ".join(f"{row.label} ({row.forbidden_path})" for row in forbidden)
        yield f"A path that would be faster is forbidden by the rank activation, which needs the code: {paths}."
    heads = [name for name, module in model.named_modules() if isinstance(module, TiedHead)]
    if heads:
        yield f"Not in the table: {', '.join(heads)}, which multiplies with the table of the embedding."


def _about_siblings(model: nn.Module, rows: Sequence[FamilyCost], device: torch.device) -> Iterator[str]:
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


def _about_hidden_layers(rows: Sequence[FamilyCost]) -> Iterator[str]:
    if any(IN_A_KERNEL in row.extra for row in rows):
        yield (
            f"A hidden layer stays in a kernel if its activation is {', '.join(WIDE_ACTIVATIONS)}, gated or not, and "
            f"the rank of the layer behind at most {MAX_RANK}; else it is written out."
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


def _named(row: FamilyCost) -> str:
    return f"{row.label} ({row.in_size} x {row.out_size}, {row.speedup:.1f}x)"
