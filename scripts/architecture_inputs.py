"""Batches that a model of any architecture reads, found by trying: text with pictures or sound, then one alone.

Names of inputs come from the signature of ``forward``, sizes from the config.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shrunken_configs import VOCABULARY
from shrunken_exceptions import INPUT_SIZES

__all__ = ["Batch", "find_batch", "outputs", "total"]

Batch = dict[str, Any]
NUM_ROWS, NUM_TOKENS, NUM_DECODED, NUM_FRAMES, NUM_SAMPLES, NUM_PICTURES = 2, 12, 6, 64, 3200, 2
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
    torch.manual_seed(0)
    return [tensor for tensor in _tensors(model(**batch)) if tensor.is_floating_point()]


def total(tensors: list[Tensor]) -> Tensor:
    """One number in which every entry has a weight of its own, so that each has a gradient."""
    draws = torch.Generator().manual_seed(1)
    parts = [tensor for tensor in tensors if tensor.requires_grad]
    if not parts:
        raise RuntimeError("no output depends on the weights")
    weighted = [
        (part.float() * torch.randn(part.shape, generator=draws)).sum() / part.numel() ** 0.5 for part in parts
    ]
    return torch.stack(weighted).sum()


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
    parameters = inspect.signature(model.forward).parameters.values()
    known = {parameter.name for parameter in parameters}
    free = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in free}
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
    """A batch of these inputs, the number of places for pictures corrected once if the model names the right one."""
    batch = {name: INPUTS[name](model.config) for name in names}
    for _ in range(3):
        try:
            model.zero_grad()
            total(outputs(model, batch)).backward()
        except ValueError as problem:
            counts = COUNTS.search(str(problem))
            if counts is None or "input_ids" not in batch:
                raise
            batch["input_ids"] = _with_places(model.config, int(counts[2]) // NUM_ROWS)
        else:
            return batch
    raise RuntimeError("the number of places for pictures was not found")


def _with_places(config: PreTrainedConfig, number: int) -> Tensor:
    """Text in which each row begins with ``number`` places for what is no text."""
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id")
    token = next(value for name in names if (value := getattr(config, name, None)) is not None)
    ids = _ids(config)
    return torch.cat([ids[:, :1], torch.full((NUM_ROWS, number), token), ids[:, 1:]], dim=1)


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
    picture = _picture(config)
    frames = _size(config, "num_frames", "frames_per_clip", "tubelet_size", default=4)
    return picture[:, None].expand(-1, frames, -1, -1, -1).contiguous()


def _grid(config: PreTrainedConfig) -> Tensor:
    return torch.tensor([[1, 4, 4]] * NUM_PICTURES)


def _patches(config: PreTrainedConfig) -> Tensor:
    """Pictures as Qwen-VL reads them: a row for each of 4 x 4 patches."""
    patch = _size(config, "patch_size", default=8)
    times = _size(config, "temporal_patch_size", default=1)
    channels = _size(config, "in_channels", "in_chans", "num_channels", default=3)
    return _noise(NUM_PICTURES * 16, channels * times * patch * patch)


def _features(config: PreTrainedConfig) -> Tensor:
    bins = _size(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", default=80)
    return _noise(NUM_ROWS, bins, NUM_FRAMES)


MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
COMPANIONS: dict[str, tuple[str, ...]] = {"pixel_values": ("image_grid_thw",), "pixel_values_videos": ()}
INPUTS: dict[str, Callable[[PreTrainedConfig], Any]] = {
    "input_ids": _ids,
    "decoder_input_ids": lambda config: _ids(config, NUM_DECODED),
    "pixel_values": _picture,
    "pixel_values_videos": _video,
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "hidden_states": _patches,
    "input_features": _features,
    "input_values": lambda config: _noise(NUM_ROWS, NUM_SAMPLES),
    "bbox": lambda config: torch.tensor([[[1, 2, 3, 4]] * NUM_TOKENS] * NUM_ROWS),
}
