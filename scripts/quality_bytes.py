"""Task "bytes" of the quality benchmark: a small GPT-2 on the bytes of standard library modules."""

import importlib
import inspect
import platform

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from quality_task import Batch, Task, model_loss

MODULES = (
    "json", "argparse", "ast", "http.client", "unittest.mock", "typing", "email.message", "tarfile", "zipfile",
    "subprocess", "logging", "threading",
)  # fmt: skip
LENGTH, BATCH_SIZE = 96, 16
HELD_OUT_SHARE = 0.1
HELD_OUT_SEQUENCES = 192


class ByteBatches:
    """Sequences from random places of the text."""

    def __init__(self, text: np.ndarray, seed: int) -> None:
        self.text, self.seed = text, seed

    def __getitem__(self, number: int) -> Batch:
        random = np.random.default_rng([self.seed, number])
        starts = random.integers(len(self.text) - LENGTH + 1, size=BATCH_SIZE)
        return _batch(np.stack([self.text[start : start + LENGTH] for start in starts]))


def bytes_task() -> Task:
    """The task, on the sources that the running Python has."""
    parts = [split_text(module_source(name)) for name in MODULES]
    training = np.concatenate([part for part, _ in parts])
    held_out = _spread(np.concatenate([windows(part) for _, part in parts]))
    return Task(
        name="bytes",
        data=f"modules of Python {platform.python_version()}",
        steps_per_epoch=None,
        model_class=GPT2LMHeadModel,
        build_config=_config,
        target_modules=["c_attn", "c_proj", "c_fc"],  # an embedding of 256 rows is too small to be worth a train
        batches=lambda seed: ByteBatches(training, seed),
        held_out=[_batch(held_out[i : i + BATCH_SIZE]) for i in range(0, len(held_out), BATCH_SIZE)],
        loss=model_loss,
        num_targets=lambda batch: batch["labels"][:, 1:].numel(),
    )


def module_source(name: str) -> bytes:
    """The source of a module.

    Raises:
        ValueError: If this Python comes without its sources.
    """
    try:
        return inspect.getsource(importlib.import_module(name)).encode()
    except OSError as error:
        raise ValueError(
            f"The source of module {name} was not found: this Python seems to come without the sources of its "
            "library. Task bytes needs them; use one that has them, or task code with --code_file."
        ) from error


def split_text(source: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and the last part, which is held out."""
    values = np.frombuffer(source, dtype=np.uint8)
    cut = len(values) - int(len(values) * HELD_OUT_SHARE)
    return values[:cut], values[cut:]


def windows(values: np.ndarray) -> np.ndarray:
    """``values`` cut into sequences, one a row, the odd rest left out."""
    return values[: len(values) // LENGTH * LENGTH].reshape(-1, LENGTH)


def _spread(rows: np.ndarray) -> np.ndarray:
    """As many rows as are measured on, from all over."""
    number = min(HELD_OUT_SEQUENCES, len(rows))
    return rows[np.arange(number) * len(rows) // number]


def _batch(rows: np.ndarray) -> Batch:
    ids = torch.from_numpy(rows.astype(np.int64))
    return {"input_ids": ids, "labels": ids}


def _config(width: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
