"""A batch of the shape that a Transformers model trains on, for estimates: tokens or pixels, and labels."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["example_batch"]

_ONE_LABEL_A_ROW = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def example_batch(model: PreTrainedModel, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Zeros for the inputs and labels of ``model``.

    Args:
        model: A model with a loss: its forward takes ``labels``.
        batch_size: Rows.
        seq_len: Tokens a row, for encoder and decoder; models of images take the size from their config.

    Raises:
        ValueError: If a size is not positive or more than the model takes, the model takes neither tokens nor
            pixels, or no labels.
    """
    for name, size in (("batch_size", batch_size), ("seq_len", seq_len)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} is not a positive integer. Use at least 1.")
    longest = getattr(model.config, "max_position_embeddings", None)
    if model.main_input_name == "input_ids" and longest is not None and seq_len > longest:
        raise ValueError(
            f"seq_len={seq_len} is more than the {longest} positions of this {type(model).__name__}. Use at most that."
        )
    rows = (batch_size, seq_len)
    takes = inspect.signature(type(model).forward).parameters
    if "labels" not in takes or model.main_input_name not in ("input_ids", "pixel_values"):
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name!r}"
            f"{'' if 'labels' in takes else ' and no labels'}, and it is not known what a batch of it looks like. "
            "Pass one: estimate_memory(model, inputs={...}) with tensors from which it computes a loss."
        )
    batch = {"input_ids": torch.zeros(rows, dtype=torch.long)}
    if model.main_input_name == "pixel_values":
        side = model.config.image_size
        sides = (side, side) if isinstance(side, int) else tuple(side)
        batch = {"pixel_values": torch.zeros(batch_size, getattr(model.config, "num_channels", 3), *sides)}
    one_a_row = type(model).__name__.endswith(_ONE_LABEL_A_ROW)
    batch["labels"] = torch.zeros(rows[:1] if one_a_row else rows, dtype=torch.long)
    return batch
