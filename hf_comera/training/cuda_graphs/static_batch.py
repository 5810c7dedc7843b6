"""``PaddingBuckets`` and ``StaticBatch``: batches of few shapes, in memory that stays where it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PaddingBuckets", "StaticBatch", "pad_values_of"]

Shapes = dict[str, tuple[int, ...]]


class PaddingBuckets:
    """Which length a batch is padded to.

    Args:
        lengths: The lengths that there shall be, or None for batches as they come.
        pad_values: For each tensor of a batch that has a sequence axis, its second: the value that pads the sequence.
            None for a tensor of two or more axes that has none.

    Raises:
        ValueError: If a length is no positive integer.
    """

    def __init__(self, lengths: Sequence[int] | None, pad_values: Mapping[str, float | None]) -> None:
        valid = lengths is None or (
            len(lengths) > 0 and all(isinstance(length, int) and not isinstance(length, bool) for length in lengths)
        )
        if not valid or (lengths is not None and min(lengths) < 1):
            raise ValueError(
                f"buckets={lengths!r} is needed as positive lengths to pad sequences to, for example "
                "buckets=(64, 128, 256), or None for batches that all have one shape."
            )
        self.lengths = None if lengths is None else sorted(set(lengths))
        self.pad_values = dict(pad_values)

    def complete(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the attention mask that it needs once it is padded."""
        batch = dict(batch)
        if self.lengths is None or "input_ids" not in batch or self.pad_values.get("attention_mask") is None:
            return batch
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        return batch

    def shapes(self, batch: Mapping[str, Any]) -> Shapes | None:
        """The padded shape of every tensor in ``batch``; None if a sequence is longer than the largest bucket.

        Raises:
            ValueError: If it is not known how to pad a tensor.
        """
        found: Shapes = {}
        for name, tensor in batch.items():
            if not isinstance(tensor, Tensor):
                continue
            found[name] = tuple(tensor.shape)
            if self.lengths is None or tensor.ndim < 2 or self._stays(name, tensor):
                continue
            length = next((length for length in self.lengths if length >= tensor.shape[1]), None)
            if length is None:
                return None
            found[name] = (tensor.shape[0], length, *tensor.shape[2:])
        return found

    def _stays(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor has no sequence axis."""
        if name == "labels" and tensor.is_floating_point():
            return True  # of regression, or of several classes at once
        if name not in self.pad_values:
            raise ValueError(
                f"The batch has {name!r} of shape {tuple(tensor.shape)}, and how to pad it is not known. Give "
                f"pad_values={{{name!r}: 0}} with the value that pads a sequence, or {{{name!r}: None}} if its second "
                "axis is no sequence."
            )
        return self.pad_values[name] is None


class StaticBatch:
    """Tensors on the device into which batches of the same padded shapes are copied.

    Args:
        batch: The first one; entries that are no tensors are kept.
        shapes: Of its tensors, padded.
        pad_values: The values that pad a sequence.
        device: Where the tensors lie.
    """

    def __init__(
        self, batch: Mapping[str, Any], shapes: Shapes, pad_values: Mapping[str, float | None], device: torch.device
    ) -> None:
        self._pad_values = pad_values
        self.values: dict[str, Any] = dict(batch)
        for name, shape in shapes.items():
            self.values[name] = torch.empty(shape, dtype=batch[name].dtype, device=device)

    def fill(self, batch: Mapping[str, Any]) -> None:
        """Copy ``batch`` in, and pad it."""
        for name, buffer in self.values.items():
            if not isinstance(buffer, Tensor):
                continue
            tensor, place = batch[name], buffer
            if tensor.shape != buffer.shape:
                length, value = tensor.shape[1], self._pad_values[name]
                assert value is not None
                buffer[:, length:].fill_(value)
                place = buffer[:, :length]
            place.copy_(tensor, non_blocking=True)


def pad_values_of(model: nn.Module, given: Mapping[str, float | None] | None) -> dict[str, float | None]:
    """The padding values of the tensors of a batch for ``model``: the usual ones, and the given ones."""
    token = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    usual: dict[str, float | None] = {
        "input_ids": token,
        "attention_mask": 0,
        "token_type_ids": 0,
        "labels": -100,
        "decoder_input_ids": token,
        "decoder_attention_mask": 0,
    }
    return {**usual, **(given or {})}
