"""Batches that a model of any architecture reads, found by trying: text with pictures or sound, then one alone.

Names of inputs come from the signature of ``forward``, sizes from the config.
"""

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from benchmarks.architectures.configs import VOCABULARY, WIDTH
from benchmarks.architectures.exceptions import INPUT_SIZES, NEEDED_INPUTS

__all__ = ["Batch", "find_batch", "outputs", "total"]

Batch = dict[str, Any]
NUM_ROWS, NUM_TOKENS, NUM_DECODED, NUM_FRAMES, NUM_SAMPLES, NUM_PICTURES = 2, 12, 6, 64, 3840, 2
SERIES = 18  # a context of 16 and a lag of 2
SENTINEL = 5  # ids below are those of padding and ends in most vocabularies
CACHES = re.compile("past_key_values|.*cache.*|state|mems|.*buckets.*")
COUNTS = re.compile(r"tokens\D{0,40}?(\d+)\D+?features?\D{0,20}?(\d+)", re.DOTALL)
"""How Transformers says that a text has another number of places for pictures than the pictures fill."""


def find_batch(model: PreTrainedModel, problems: dict[str, str] | None = None) -> Batch:
    """The richest batch that ``model`` can be trained on.

    Args:
        model: Dense; its gradients are gone afterwards.
        problems: Filled in: what went wrong with each set of inputs that is richer.

    Raises:
        RuntimeError: If none is; says what went wrong with each.
    """
    problems = {} if problems is None else problems
    for names in _candidates(model):
        try:
            return _fitted(model, names)
        except Exception as problem:
            problems[" + ".join(names)] = f"{type(problem).__name__}: {problem}"
    raise RuntimeError("; ".join(f"{names}: {problem}" for names, problem in problems.items()) or "no input is known")


def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """All floating-point outputs of one call that starts from the same random numbers each time, caches left out."""
    set_seed(0)
    return [tensor for tensor in _tensors(model(**batch)) if tensor.is_floating_point()]


def total(tensors: list[Tensor]) -> Tensor:
    """One number in which every entry has a weight of its own, so that each has a gradient."""
    draws = torch.Generator().manual_seed(1)
    parts = [tensor for tensor in tensors if tensor.requires_grad]
    if not parts:
        raise RuntimeError("no output depends on the weights")
    weighted = [_weighted(part.float().nan_to_num(neginf=0.0, posinf=0.0), draws) for part in parts]
    return torch.stack(weighted).sum()


def _weighted(part: Tensor, draws: torch.Generator) -> Tensor:
    return (part * torch.randn(part.shape, generator=draws)).sum() / max(part.numel(), 1) ** 0.5


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            if not CACHES.fullmatch(name):
                yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _candidates(model: PreTrainedModel) -> Iterator[tuple[str, ...]]:
    """Sets of names of inputs, the richest first; all that ``forward`` cannot do without is in each."""
    parameters = _parameters(model).values()
    known = {parameter.name for parameter in parameters}
    free = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in free}
    needed |= set(NEEDED_INPUTS.get(model.config.model_type, ()))
    text = {"input_ids", "decoder_input_ids"} & known
    others = [name for name in MEDIA if name in known] or [""]
    seen = set()
    for base in (text, text - {"decoder_input_ids"}, text - {"input_ids"}, set()):
        for other in (*others, ""):
            names = {*base, *needed, other} - {""}
            names |= {name for name in COMPANIONS.get(other, ()) if name in known}
            key = tuple(sorted(names))
            if names and key not in seen and names <= set(INPUTS):
                seen.add(key)
                yield key


def _fitted(model: PreTrainedModel, names: tuple[str, ...]) -> Batch:
    """A batch of these inputs in the first forms that work, with as many places for pictures as the model asks for."""
    problems = []
    for forms in itertools.product(*(INPUTS[name] for name in names)):
        try:
            return _with_right_counts(
                model, {name: form(model.config) for name, form in zip(names, forms, strict=True)}
            )
        except Exception as problem:
            problems.append(problem)
    raise problems[0]


def _with_right_counts(model: PreTrainedModel, batch: Batch) -> Batch:
    """``batch``, with as many places for pictures as the model asks for when it refuses the text.

    Some models count the entries of the pictures, not the places, so both are tried.
    """
    try:
        return _trained(model, batch)
    except ValueError as problem:
        counts = COUNTS.search(str(problem))
        if counts is None or "input_ids" not in batch:
            raise
        for number in (int(counts[2]) // NUM_ROWS, int(counts[2]) // (NUM_ROWS * WIDTH)):
            with contextlib.suppress(ValueError):
                return _trained(model, batch | _with_places(model, number))
        raise


def _trained(model: PreTrainedModel, batch: Batch) -> Batch:
    """``batch``, after a forward and a backward pass."""
    model.zero_grad()
    total(outputs(model, batch)).backward()
    if not all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None):
        raise RuntimeError("gradients of the dense model are not finite")
    return batch


def _with_places(model: PreTrainedModel, number: int) -> Batch:
    """Text in which each row has ``number`` places for what is no text."""
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id")
    token = next(value for name in names if (value := getattr(model.config, name, None)) is not None)
    ids = _ids(model.config)
    ids = torch.cat([ids[:, :1], torch.full((NUM_ROWS, number), token), ids[:, 1:]], dim=1)
    types = "mm_token_type_ids"
    return {"input_ids": ids} | ({types: (ids == token).long()} if types in _parameters(model) else {})


def _parameters(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _size(config: PreTrainedConfig, *names: str, default: int) -> int:
    """The first of these settings that the config or a config inside of it has."""
    own = INPUT_SIZES.get(config.model_type, {})
    for name in names:
        for place in (own, *_configs(config)):
            value = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
            if isinstance(value, list | tuple):
                value = value[0]
            if type(value) is int and value > 0:
                return value
    return default


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)


def _ids(config: PreTrainedConfig, number: int = NUM_TOKENS) -> Tensor:
    vocabulary = min(_size(config, "vocab_size", default=VOCABULARY), VOCABULARY)
    top = vocabulary - 56 if vocabulary == VOCABULARY else vocabulary
    draws = torch.Generator().manual_seed(2)
    return torch.randint(min(SENTINEL, top - 1), top, (NUM_ROWS, number), generator=draws)


def _noise(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(3))


def _picture(config: PreTrainedConfig) -> Tensor:
    size = _size(config, "image_size", "img_size", "pretrain_image_size", default=32)
    return _noise(NUM_ROWS, _size(config, "num_channels", "in_channels", "in_chans", default=3), size, size)


def _video(config: PreTrainedConfig) -> Tensor:
    frames = _size(config, "num_frames", "frames_per_clip", "tubelet_size", default=4)
    return _picture(config)[:, None].expand(-1, frames, -1, -1, -1).contiguous()


def _pairs(config: PreTrainedConfig) -> Tensor:
    picture = _picture(config)
    return torch.stack([picture, picture.flip(-1)], dim=1)


def _patches(config: PreTrainedConfig) -> Tensor:
    """Pictures as Qwen-VL reads them: a row for each of 4 x 4 patches."""
    return _noise(NUM_PICTURES * 16, _patch_entries(config))


def _patches_of_rows(config: PreTrainedConfig) -> Tensor:
    """The same with a dimension for the pictures."""
    return _noise(NUM_PICTURES, 16, _patch_entries(config))


def _patches_as_pictures(config: PreTrainedConfig) -> Tensor:
    patch = _size(config, "patch_size", default=8)
    return _noise(NUM_PICTURES * 16, 3, patch, patch)


def _patch_entries(config: PreTrainedConfig) -> int:
    patch = _size(config, "patch_size", default=8)
    times = _size(config, "temporal_patch_size", "patch_temporal", default=1)
    return _size(config, "in_channels", "in_chans", "num_channels", default=3) * times * patch * patch


def _numbered_patches(config: PreTrainedConfig) -> Tensor:
    """Patches with the numbers of their row and column in front."""
    return torch.cat([torch.ones(NUM_ROWS, 16, 2), _noise(NUM_ROWS, 16, _patch_entries(config))], dim=-1)


def _places_of_pictures(config: PreTrainedConfig) -> Tensor:
    mask = torch.zeros(NUM_ROWS, NUM_TOKENS, dtype=torch.long)
    mask[:, 1 : 1 + _size(config, "latent_query_num", default=4)] = 1
    return mask


def _features(config: PreTrainedConfig) -> Tensor:
    names = ("num_mel_bins", "input_feat_per_channel", "n_mels", "num_mel_channels", "input_channels", "feature_size")
    return _noise(NUM_ROWS, _size(config, *names, default=80), NUM_FRAMES)


def _features_last(config: PreTrainedConfig) -> Tensor:
    return _features(config).transpose(1, 2).contiguous()


def _features_of_one_channel(config: PreTrainedConfig) -> Tensor:
    return _features_last(config)[:, None].contiguous()


def _sound(config: PreTrainedConfig) -> Tensor:
    return _noise(NUM_ROWS, NUM_SAMPLES)


def _sound_of_one_channel(config: PreTrainedConfig) -> Tensor:
    return _noise(NUM_ROWS, 1, 7680)


def _values(config: PreTrainedConfig) -> Tensor:
    """A time series."""
    length = _size(config, "context_length", "seq_length", default=32)
    return _noise(NUM_ROWS, length, _size(config, "num_input_channels", default=1))


def _series(config: PreTrainedConfig) -> Tensor:
    return _noise(NUM_ROWS, SERIES)


def _boxes(config: PreTrainedConfig) -> Tensor:
    return torch.tensor([[[1, 2, 3, 4]] * NUM_TOKENS] * NUM_ROWS)


def _grid(config: PreTrainedConfig) -> Tensor:
    return torch.tensor([[1, 4, 4]] * NUM_PICTURES)


def _hidden(config: PreTrainedConfig) -> Tensor:
    return _noise(NUM_ROWS, NUM_TOKENS, _size(config, "encoder_hidden_size", "hidden_size", default=64))


MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "inputs", "input", "audio_values",
         "flattened_patches")  # fmt: skip
COMPANIONS: dict[str, tuple[str, ...]] = {
    "pixel_values": ("image_grid_thw", "bbox", "spatial_shapes"),
    "": ("bbox",),
}
INPUTS: dict[str, tuple[Callable[[PreTrainedConfig], Any], ...]] = {
    # several forms where models differ in what they call by the same name; the first that works is taken
    "input_ids": (_ids,),
    "decoder_input_ids": (lambda config: _ids(config, NUM_DECODED),),
    "pixel_values": (_picture, _patches, _video, _pairs, _patches_of_rows, _patches_as_pictures),
    "pixel_values_videos": (_video, lambda config: _video(config).transpose(1, 2).contiguous(), _patches),
    "image_grid_thw": (_grid,),
    "grid_thw": (_grid,),
    "hidden_states": (_patches, _hidden, _sound_of_one_channel),
    "input_features": (_features, _features_last, _features_of_one_channel),
    "input_values": (_sound, _sound_of_one_channel, _features_last),
    "audio_values": (_sound, _sound_of_one_channel),
    "inputs": (_ids, _sound, _picture),
    "input": (_ids, _picture),
    "bbox": (_boxes,),
    "past_values": (_values, _series),
    "pixel_attention_mask": (lambda config: torch.ones(NUM_PICTURES, 16, dtype=torch.long),),
    "spatial_shapes": (lambda config: torch.tensor([[4, 4]] * NUM_PICTURES),),
    "flattened_patches": (_numbered_patches,),
    "query_embeds": (_hidden,),
    "encoder_hidden_states": (_hidden,),
    "inputs_embeds": (_hidden,),
    "encoder_attention_mask": (lambda config: torch.ones(NUM_ROWS, NUM_TOKENS),),
    "qformer_input_ids": (_ids,),
    "input_features_mask": (lambda config: torch.ones(NUM_ROWS, NUM_FRAMES, dtype=torch.long),),
    "audio_mel": (_features_last,),
    "audio_mel_mask": (lambda config: torch.zeros(NUM_ROWS, NUM_FRAMES, dtype=torch.bool),),
    "target_sizes": (lambda config: torch.tensor([[4, 4]] * NUM_PICTURES),),
    "visual_feats": (lambda config: _noise(NUM_ROWS, 4, _size(config, "visual_feat_dim", default=64)),),
    "visual_pos": (lambda config: _noise(NUM_ROWS, 4, 4).sigmoid(),),
    "states": (lambda config: _noise(NUM_ROWS, NUM_TOKENS, _size(config, "state_dim", default=17)),),
    "actions": (lambda config: _noise(NUM_ROWS, NUM_TOKENS, _size(config, "act_dim", default=4)),),
    "rewards": (lambda config: _noise(NUM_ROWS, NUM_TOKENS, 1),),
    "returns_to_go": (lambda config: _noise(NUM_ROWS, NUM_TOKENS, 1),),
    "timesteps": (lambda config: torch.arange(NUM_TOKENS).repeat(NUM_ROWS, 1),),
    "attention_mask": (lambda config: torch.ones(NUM_ROWS, NUM_TOKENS),),
    "past_time_features": (lambda config: _noise(NUM_ROWS, SERIES, 1),),
    "past_observed_mask": (lambda config: torch.ones(NUM_ROWS, SERIES),),
    "future_values": (lambda config: _noise(NUM_ROWS, 8),),
    "future_time_features": (lambda config: _noise(NUM_ROWS, 8, 1),),
    "mm_token_type_ids": (lambda config: torch.zeros(NUM_ROWS, NUM_TOKENS, dtype=torch.long),),
    "token_type_ids": (lambda config: torch.zeros(NUM_ROWS, NUM_TOKENS, dtype=torch.long),),
    "image_attention_mask": (lambda config: torch.ones(NUM_ROWS, NUM_TOKENS, 4),),
    "image_embeds_position_mask": (_places_of_pictures,),
    "use_cache": (lambda config: False,),
    "latents": (lambda config: _hidden(config).transpose(1, 2).contiguous(),),
}
