"""Small configs of any architecture, made from its default config by rules on the names of settings.

Layers become two (more where layers are of several kinds, one of each), widths 64, heads 4, vocabularies 256; settings
that follow from these (sizes of a head, lists with an entry a layer, ids of tokens) follow. Sub-configs too.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.architectures.exceptions import EXCEPTIONS, NEEDED

__all__ = ["short_config", "shrunken_config"]

WIDTH, HIDDEN_WIDTH, HEADS, HEAD_WIDTH, VOCABULARY = 64, 128, 4, 16, 256
MOST_KINDS_OF_LAYERS = 4
LAYERS = re.compile(
    r"(?!num_(residual|feat_extract|adapter|lstm|shared|kv_shared|nextn)\w*layers)"
    r"(\w+_)?(n|num)_(\w+_)?(layers?|blocks)|(\w+_)?layers|depth|\w+_depth|max_window_layers"
)
TOKEN_IDS = re.compile(r"(\w+_)?token_(id|index|ids)|\w+_id|eoi_token_index")
LAYER_NUMBERS = re.compile(r"\w*(layers_to_\w+|indexes|indices|_layer_ids|_layer_idxs?|feature_layers?|layer_indices)")
"""Settings that are numbers of layers."""
KEY_VALUE_HEADS = re.compile(r"(\w+_)?(num_key_value_heads|num_kv_heads|n_kv_heads|n_head_kv)")
STAGE_DEPTHS = {
    "depths",
    "blocks_per_stage",
    "stage_numb_of_layers",
    "stage_num_blocks",
    "depth",
    "num_blocks",
    "layers",
}
STAGE_WIDTHS = {"hidden_sizes", "embed_dims", "embed_dim", "embed_dim_per_stage", "neck_hidden_sizes", "conv_dim",
                "tdnn_dim", "backbone_channel_list"}  # fmt: skip
STAGE_HEADS = {"num_attention_heads", "num_heads", "num_attention_heads_per_stage"}


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def _all_at_most(limit: int) -> Callable[[int], int]:
    return lambda value: limit if value > limit else value


RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    # the first rule whose expression matches the whole name of an integer setting makes it smaller
    (r"(\w+_)?vocab_size(_\w+)?|num_embeddings|codebook_size|head_out_channels", _at_most(VOCABULARY)),
    (r"qk_rope_head_dim|rotary_dim|index_rope_dim|rope_head_dim", _at_most(8)),
    (r"qk_head_dim", _at_most(HEAD_WIDTH + 8)),
    (r"(\w+_)?head_dim|d_kv|d_head|dim_head|kv_channels|mamba_d_head|attention_head_size|mamba_headdim|head_size",
     _at_most(HEAD_WIDTH)),
    (r"(\w+_)?lora_rank", _at_most(16)),
    (r"(\w+_)?d_state|(\w+_)?state_size|time_step_rank", _at_most(8)),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", _at_most(8)),
    (r"(\w+_)?(num_attention_heads|attention_heads|num_heads|n_heads?|num_query_heads|num_value_heads)",
     _at_most(HEADS)),
    (r"index_n_heads|linear_num_key_heads", _at_most(2)),
    (r"(\w+_)?(num_experts|n_routed_experts|num_local_experts|moe_num_experts|ffn_num_experts)", _at_most(4)),
    (r"(\w+_)?(num_experts_per_to(k|ken)|moe_topk|moe_top_k|moe_k|n_group|expert_top_k)", _at_most(2)),
    (r"topk_group|first_k_dense_replace|(\w+_)?shared_experts", _at_most(1)),
    (r"(\w+_)?(intermediate_size|ffn_dim|d_ff|mlp_dim|ffn_hidden_size|d_inner|n_inner|ff_dim|intermediate_dim)",
     _all_at_most(HIDDEN_WIDTH)),
    (r"(?!num_|max_|min_|block)(\w+_)?(hidden_size|hidden_sizes|d_model|n_embd|dim|embed_dim|emb_dim|embedding_size|"
     r"embedding_dim|projection_size|proj_size|proj_dim|width|output_size|hidden_channels|latent_size|d_embed|"
     r"dimension|output_channels|hidden_dimension|d_latents|projector_dim|filter_size|fusion_size)(_\w*input)?",
     _all_at_most(WIDTH)),
    (r"upsample_groups", _all_at_most(WIDTH)),
    (r"max_source_positions", _at_most(32)),
    (r"sliding_window(_size)?|attention_window|attention_chunk_size|local_attention", _at_most(4)),
    (r"(max_\w*position\w*|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length|context_length)",
     _at_most(128)),
    (r"index_topk|num_quer(y_tokens|ies)|num_image_tokens|mm_tokens_per_image|num_proposals", _at_most(4)),
    (r"(input_|pretrain_)?image_size|img_size", _at_most(32)),
    (r"patch_size", _at_most(8)),
    (r"num_position_embeddings|num_patches", _at_most(16)),
    (r"mamba_chunk_size|chunk_size|mamba_d_ssm", _at_most(HIDDEN_WIDTH)),
)  # fmt: skip


def shrunken_config(model_type: str) -> PreTrainedConfig:
    """A config of the architecture whose models have a few hundred thousand parameters.

    Args:
        model_type: As in ``config.json``.
    """
    default = CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))
    changes = _merged(NEEDED.get(model_type, {}), _changes(default, _new_ids(default)))
    return CONFIG_MAPPING[model_type](**_merged(changes, EXCEPTIONS.get(model_type, {})))


def short_config(model_type: str, layers: int = 4) -> PreTrainedConfig:
    """The default config, of full size but for its number of layers.

    Args:
        model_type: As in ``config.json``.
        layers: The most that each part of the model has.
    """
    default = CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))
    changes = _merged(NEEDED.get(model_type, {}), _fewer_layers(default, layers, everywhere=True))
    return CONFIG_MAPPING[model_type](**changes)


def _changes(config: PreTrainedConfig, ids: Mapping[int, int]) -> dict[str, Any]:
    """New values of the settings that become smaller; of configs inside of this one, whole dictionaries."""
    changes: dict[str, Any] = {}
    settings = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in settings.items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = _merged(_plain(value), _changes(value, ids))
        elif TOKEN_IDS.fullmatch(name):
            changes[name] = _renumbered(value, ids)
        elif name == "rope_parameters" and value:
            changes[name] = _smaller_rope(value, "mrope_section" in config.ignore_keys_at_rope_validation)
        elif isinstance(value, list | tuple) and len(value) > 1 and name.startswith(("image_size", "img_size")):
            changes[name] = type(value)(_smaller("image_size", size) for size in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            changes[name] = _smaller(name, value)
    changes |= _key_value_heads(settings) | _stages(settings) | _fewer_layers(config, 2)
    return {
        name: value for name, value in changes.items() if value is not settings.get(name) and _is_given(config, name)
    }


def _smaller(name: str, value: int) -> int:
    rule = next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), None)
    return value if rule is None or value < 0 else rule(value)


def _key_value_heads(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of queries where there were some, one head where there was one, and else as many as queries have."""
    changes = {}
    for name, value in settings.items():
        if KEY_VALUE_HEADS.fullmatch(name) and isinstance(value, int) and not isinstance(value, bool):
            heads = settings.get(name.replace("key_value", "attention").replace("kv", "attention"), 0)
            changes[name] = min(value, HEADS if value == heads else HEADS // 2)
    return changes


def _stages(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Hierarchical models: stages of at most two layers, widths from 16 on, heads in the same proportions."""
    changes: dict[str, Any] = {}
    attends = any(re.search("heads|channel_list", name) for name in settings)  # others are left as wide as they are
    for name, value in settings.items():
        if not isinstance(value, list | tuple) or not value or not all(type(size) is int for size in value):
            continue
        if name in STAGE_DEPTHS:
            changes[name] = type(value)(min(depth, 2) for depth in value)
        elif name in STAGE_WIDTHS and attends and all(size * 16 % min(value) == 0 for size in value):
            changes[name] = type(value)(size * (32 if len(set(value)) == 1 else 16) // min(value) for size in value)
        elif name == "decoder_in_channels":
            changes[name] = type(value)([WIDTH] * len(value))
        elif name in STAGE_HEADS:
            changes[name] = type(value)(size // math.gcd(*value) for size in value)
    if "embed_dim_per_stage" in settings:
        changes["hidden_size"] = 16
    if isinstance(settings.get("num_heads"), list | tuple) and isinstance(settings.get("embed_dim"), int):
        changes["embed_dim"] = 16
    return changes


def _fewer_layers(config: PreTrainedConfig, limit: int, *, everywhere: bool = False) -> dict[str, Any]:
    """Numbers of layers, and the lists with an entry for each: one layer of each kind, or the first ones.

    Args:
        config: Read, not changed.
        limit: Layers that are left; more where there are more kinds, but not more than four.
        everywhere: Also in the configs inside of this one.
    """
    settings = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    stages = {len(settings[name]) for name in STAGE_DEPTHS & set(settings) if isinstance(settings[name], list | tuple)}
    numbers = {
        name: value
        for name, value in settings.items()
        if type(value) is int and LAYERS.fullmatch(name) and value not in stages
    }
    named = [v for name, v in settings.items() if LAYER_NUMBERS.fullmatch(name) and isinstance(v, list | tuple)]
    outputs = [*named, getattr(config, "out_indices", None) or ()]
    limit = max(limit, min(max(map(len, outputs)), MOST_KINDS_OF_LAYERS))
    changes: dict[str, Any] = {name: min(value, limit) for name, value in numbers.items()}
    for number in {value for value in numbers.values() if value > limit}:
        lists = {
            name: value for name, value in settings.items() if isinstance(value, list | tuple) and len(value) == number
        }
        kept = _one_of_each(list(zip(*lists.values(), strict=True)), limit) if lists else list(range(limit))
        changes |= {name: len(kept) for name, value in numbers.items() if value == number}
        changes |= {name: type(value)(value[index] for index in kept) for name, value in lists.items()}
    if numbers:
        depth = max(changes[name] for name in numbers)
        changes |= {name: _within(value, depth) for name, value in settings.items() if LAYER_NUMBERS.fullmatch(name)}
        if getattr(config, "out_indices", None) and not stages:
            changes |= _outputs(config, depth)
    if "attention_types" in settings:  # GPT-Neo's way to say it: kinds of layers, and how often they follow each other
        kinds = settings["attention_types"][0][0]
        changes["attention_types"] = [[kinds, changes["num_layers"] // len(kinds)]]
    if "num_kv_shared_layers" in settings:
        changes["num_kv_shared_layers"] = 0  # some need a layer of each kind that does not share
    if everywhere:
        parts = {name: value for name, value in settings.items() if isinstance(value, PreTrainedConfig)}
        changes |= {
            name: _merged(_plain(part), _fewer_layers(part, limit, everywhere=True)) for name, part in parts.items()
        }
    return {name: value for name, value in changes.items() if _is_given(config, name)}


def _one_of_each(entries: Sequence[Any], limit: int) -> list[int]:
    """Indices of the first layer of each kind, at most ``MOST_KINDS_OF_LAYERS``; filled up to ``limit`` layers.

    >>> _one_of_each(["a", "a", "b", "a"], 2), _one_of_each(["a", "a", "a"], 2)
    ([0, 2], [0, 1])
    """
    first: dict[str, int] = {}
    for index, entry in enumerate(entries):
        first.setdefault(repr(entry), index)
    kept = list(first.values())[:MOST_KINDS_OF_LAYERS]
    others = [index for index in range(len(entries)) if index not in kept]
    return sorted([*kept, *others[: max(limit - len(kept), 0)]])


def _within(value: Any, depth: int) -> Any:
    """Numbers of layers, no larger than there are: the last ones count from the end."""
    if isinstance(value, list | tuple) and all(type(number) is int for number in value):
        if all(-depth <= number < depth for number in value):
            return value
        return type(value)(range(max(depth - len(value), 0), depth))
    return (
        depth - 1 if type(value) is int and value >= depth else -1 if type(value) is int and value < -depth else value
    )


def _outputs(config: Any, depth: int) -> dict[str, Any]:
    """Of a backbone whose stages are its layers: as many outputs as before, from the last layers."""
    number = len(config.out_indices)
    indices = range(depth - number + 1, depth + 1)
    names = ["stem", *(f"stage{index}" for index in range(1, depth + 1))]
    return {"out_features": [names[index] for index in indices], "out_indices": list(indices)}


def _smaller_rope(value: dict[str, Any], in_sections: bool) -> dict[str, Any]:
    """Sections of rotary positions that fill the smaller head."""
    if any(isinstance(part, dict) for part in value.values()):
        return {
            name: _smaller_rope(part, in_sections) if isinstance(part, dict) else part for name, part in value.items()
        }
    if not in_sections and "mrope_section" not in value:
        return value
    third = HEAD_WIDTH // 6
    return value | {"mrope_section": [HEAD_WIDTH // 2 - 2 * third, third, third], "partial_rotary_factor": 1.0}


def _new_ids(config: PreTrainedConfig) -> dict[int, int]:
    """For each id of a token that is beyond the smaller vocabulary one at its end; the same id all over the config."""
    large = sorted({number for number in _all_ids(config) if number >= VOCABULARY - 56})
    return {number: VOCABULARY - len(large) + index for index, number in enumerate(large)}


def _all_ids(config: PreTrainedConfig) -> list[int]:
    found = []
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found += _all_ids(value)
        elif TOKEN_IDS.fullmatch(name):
            found += [
                number for number in (value if isinstance(value, list | tuple) else [value]) if type(number) is int
            ]
    return found


def _renumbered(value: Any, ids: Mapping[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(ids.get(number, number) for number in value)
    return ids.get(value, value)


def _plain(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as a dictionary, with what its class needs to be found."""
    return {name: value for name, value in config.to_dict().items() if name == "model_type" or _is_given(config, name)}


def _is_given(config: PreTrainedConfig, name: str) -> bool:
    """Whether this is a setting that the config is made with, not one that follows from others."""
    names = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else {name}
    return name in names | {"out_features", "out_indices"} and name not in ("dtype", "architectures")


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with ``changes``, dictionaries inside of dictionaries merged too."""
    merged = dict(values)
    for name, change in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, change) if isinstance(old, dict) and isinstance(change, dict) else change
    return merged
