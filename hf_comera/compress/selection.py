"""Which layers of a model are compressed: the targets of its architecture, and names matched as PEFT does.

A row lists last parts of module names: attention and FFN projections and the word embedding. Rows may name layers of
several Transformers releases; names that a model does not have are ignored here (in a user's own list they raise).
"""

import dataclasses
import difflib
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_comera.compress.config import ComeraConfig

__all__ = [
    "ALL_LINEAR",
    "ALL_LINEAR_EXCLUDED",
    "COMPRESSIBLE_TYPES",
    "DEFAULT_TARGETS",
    "pattern_value",
    "select_layers",
]

ALL_LINEAR = "all-linear"
"""The shorthand for every linear layer except output heads, as in PEFT."""

_BERT = ("query", "key", "value", "intermediate.dense", "output.dense", "word_embeddings")
_DEBERTA_V2 = ("query_proj", "key_proj", "value_proj", "intermediate.dense", "output.dense", "word_embeddings")
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
_T5 = ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo", "shared")
_BART = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
_VIT = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", *_BERT[:5])
_NEOX = ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h", "embed_in")

DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "mpnet": ("q", "k", "v", "o", "intermediate.dense", "output.dense", "word_embeddings"),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2", "word_embeddings"),
    "deberta-v2": _DEBERTA_V2,
    "modernbert": ("Wqkv", "Wo", "Wi", "tok_embeddings"),
    "gpt2": ("c_attn", "c_proj", "c_fc", "wte"),
    "gpt_neox": _NEOX,
    "opt": (*_BART, "embed_tokens"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens"),
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "whisper": (*_BART, "embed_tokens"),
    "vit": _VIT,
    "deit": _VIT,
    "clip": (*_BART, "token_embedding"),
}

ALL_LINEAR_EXCLUDED = (
    # heads: small, and the last thing that should lose precision
    "classifier",
    "score",
    "qa_outputs",
    "lm_head",
    "lm_head.dense",
    "predictions.transform.dense",
    "vocab_transform",
    "pooler.dense",
    # routers: a handful of columns
    "router",
    "gate",
    # Gemma 3n clamps these few coefficients in place at each step of training
    "prediction_coefs",
    # state-space mixers hand these weights to fused kernels, which need real memory
    "x_proj",
    "dt_proj",
    "mixer.out_proj",
)
"""Last parts of names that ``"all-linear"`` leaves dense."""


logger = logging.getLogger(__name__)

COMPRESSIBLE_TYPES = (nn.Linear, Conv1D, nn.Embedding)
"""Exact types that can become tensor trains; subclasses may compute something else and are left alone."""


def select_layers(model: Any, config: ComeraConfig) -> list[str]:
    """Names of the layers that ``config`` targets, in the order of the model.

    Raises:
        ValueError: If an entry of ``target_modules`` or ``exclude_modules`` matches nothing, matches only layers that
            cannot be compressed, or nothing at all is selected, unless ``target_modules`` is empty.
    """
    types = {name: type(module) for name, module in model.named_modules() if name}
    layers = [name for name, kind in types.items() if kind in COMPRESSIBLE_TYPES and _has_entries(model, name)]
    _check_exclusions(config, types)
    if not isinstance(config.target_modules, str | None) and not config.target_modules:
        return []  # a dense model that is only stored smaller
    if config.target_modules is None:
        selected = _default_layers(model, config, layers)
    elif config.target_modules == ALL_LINEAR:
        selected = _all_linear(model, config, layers)
    else:
        _check_targets(config, types, layers)
        selected = _matching(config, layers)
    for setting in ("rank_pattern", "factor_pattern"):
        for pattern in getattr(config, setting):
            if not any(pattern_value({pattern: True}, name) for name in selected):
                raise ValueError(_no_match(setting, pattern, selected))
    if not selected:
        chosen = f"target_modules={config.target_modules!r} with exclude_modules={config.exclude_modules!r} leaves"
        raise ValueError(
            f"{'The defaults leave' if config.target_modules is None else chosen} nothing to compress in "
            f"{type(model).__name__}. Layers of exactly the types Linear, Conv1D and Embedding can be: it has "
            f"{_listed(_last_parts(layers)) or 'none'}. All its layers with weights: {_kinds(model)}."
        )
    return selected


def _has_entries(model: Any, name: str) -> bool:
    """Whether the layer has a weight that is not empty: some architectures make layers of no width in some sizes."""
    return bool(model.get_submodule(name).weight.numel())


def _kinds(model: Any) -> str:
    """The types of layers that own parameters, the most numerous first."""
    kinds = Counter(type(module).__name__ for module in model.modules() if list(module.parameters(recurse=False)))
    return _listed([f"{kind} ({count})" for kind, count in kinds.most_common()], limit=6) or "none"


def pattern_value(patterns: dict[str, Any], name: str) -> Any:
    """The value of the first pattern that matches the end of ``name``; None without a match. PEFT's rule."""
    # here, since importing PEFT takes a second that loading a checkpoint does not need
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(list(patterns), name)) if patterns else None


def _matching(config: ComeraConfig, layers: Iterable[str]) -> list[str]:
    from peft.tuners.tuners_utils import check_target_module_exists

    selector = _PeftSelector(config.target_modules, config.exclude_modules)
    return [name for name in layers if check_target_module_exists(selector, name)]


@dataclasses.dataclass
class _PeftSelector:
    """The part of a PEFT config that its matching helper reads."""

    target_modules: Any
    exclude_modules: Any
    target_parameters: None = None


def _default_layers(model: Any, config: ComeraConfig, layers: list[str]) -> list[str]:
    """The row of the architecture's table; for others all linear layers and the input embedding."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in DEFAULT_TARGETS:
        return _matching(dataclasses.replace(config, target_modules=list(DEFAULT_TARGETS[model_type])), layers)
    logger.warning(
        "No default targets are known for model_type=%r: all linear layers except heads and the input embedding are "
        'compressed. Set target_modules (for example "all-linear") to choose.',
        model_type,
    )
    selected = set(_all_linear(model, config, layers))
    embedding = _input_embedding(model)
    candidates = [name for name in layers if name in selected or name == embedding]
    return _matching(dataclasses.replace(config, target_modules=candidates), candidates) if candidates else []


def _input_embedding(model: Any) -> str | None:
    """Name of the embedding of tokens, if there is one; of the layer that owns its weight where it is tied."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # of images or sound
        return None
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    owner = getattr(model, "all_tied_weights_keys", {}).get(f"{name}.weight", f"{name}.weight")
    return None if name is None else owner.removesuffix(".weight")


def _all_linear(model: Any, config: ComeraConfig, layers: list[str]) -> list[str]:
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    linear = [
        name
        for name in layers
        if type(model.get_submodule(name)) is not nn.Embedding
        and model.get_submodule(name) is not head
        and not any(name == part or name.endswith(f".{part}") for part in ALL_LINEAR_EXCLUDED)
    ]
    return _matching(dataclasses.replace(config, target_modules=linear), linear) if linear else []


def _check_targets(config: ComeraConfig, types: dict[str, type], layers: list[str]) -> None:
    """Each entry of a list, or the one expression, must match a layer that can be compressed."""
    targets = config.target_modules
    for entry in [targets] if isinstance(targets, str) else targets or ():
        alone = ComeraConfig(target_modules=entry if isinstance(targets, str) else [entry])
        if _matching(alone, layers):
            continue
        found = {types[name].__name__ for name in _matching(alone, types)}
        if found:
            raise ValueError(
                f"target_modules: {entry!r} matches only layers of type {', '.join(sorted(found))}, which cannot be "
                "compressed. Supported are exactly Linear, Conv1D and Embedding. Remove it from target_modules."
            )
        raise ValueError(_no_match("target_modules", entry, layers))


def _check_exclusions(config: ComeraConfig, types: dict[str, type]) -> None:
    exclusions = config.exclude_modules
    for entry in [exclusions] if isinstance(exclusions, str) else exclusions or ():
        if not _matching(ComeraConfig(target_modules=entry if isinstance(exclusions, str) else [entry]), types):
            raise ValueError(_no_match("exclude_modules", entry, list(types)))


def _no_match(setting: str, entry: str, names: list[str]) -> str:
    known = _last_parts(names)
    near = difflib.get_close_matches(entry.rpartition(".")[2], known, n=5, cutoff=0.5)
    hint = f"Did you mean {', '.join(map(repr, near))}?" if near else f"This model has {_listed(known)}."
    return f"{setting}: {entry!r} matches no layer. {hint}"


def _last_parts(names: Iterable[str]) -> list[str]:
    """Distinct last parts of the names, in order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _listed(names: list[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
