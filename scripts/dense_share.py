"""What the default targets leave dense of a model of full size, and why: counted on the meta device."""

import re
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from architecture_classes import model_class
from hf_comera import ComeraConfig, plan
from hf_comera.compress.selection import COMPRESSIBLE_TYPES
from shrunken_configs import short_config

__all__ = ["dense_share"]


def dense_share(model_type: str) -> dict[str, Any]:
    """Columns of the row of ``model_type``: parameters, what share of them stays dense, the largest part, the reason.

    Measured on the default config with at most four layers. Where it builds no model on the meta device, the columns
    are empty but for ``dense_reason``, which says so.
    """
    try:
        with torch.device("meta"):
            model = model_class(model_type)._from_config(short_config(model_type))
    except Exception as problem:
        told = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:120]
        return {"dense_reason": f"not measured, no model on the meta device ({told})"}
    total = sum(parameter.numel() for parameter in model.parameters())
    try:
        compression = plan(model, ComeraConfig())
    except ValueError:
        compressed, ratio = set(), 1.0
    else:
        compressed, ratio = set(compression.by_name), compression.ratio
    parts = _dense_parts(model, compressed)
    pattern, _ = parts.most_common(1)[0]
    return {
        "parameters": total,
        "stays_dense": round(parts.total() / total, 4),
        "times_smaller": round(ratio, 2),
        "dense_part": pattern,
        "dense_share": round(parts[pattern] / total, 4),
        "dense_reason": _reason(model, pattern),
    }


def _dense_parts(model: PreTrainedModel, compressed: set[str]) -> Counter[str]:
    """Entries of the parameters that stay dense, by name with the numbers of layers left out."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if owner not in compressed or kind != "weight":
            parts[_pattern(name)] += parameter.numel()
    return parts


def _pattern(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _reason(model: PreTrainedModel, pattern: str) -> str:
    """Why the parameters of this name stay dense."""
    name, parameter = next(pair for pair in model.named_parameters() if _pattern(pair[0]) == pattern)
    owner = model.get_submodule(name.rpartition(".")[0])
    kind = type(owner)
    if kind in COMPRESSIBLE_TYPES:
        return f"{kind.__name__}, no default target" if name.endswith(".weight") else f"bias of {kind.__name__}"
    if isinstance(owner, nn.Embedding | nn.Linear | Conv1D):
        parent = next(base.__name__ for base in (nn.Embedding, nn.Linear, Conv1D) if isinstance(owner, base))
        return f"{kind.__name__}, a subclass of {parent}"
    if isinstance(owner, _ConvNd):
        return f"convolution ({kind.__name__})"
    return f"{parameter.ndim}-D parameter of {kind.__name__}"
