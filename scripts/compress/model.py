"""The dense model of a run, its tokenizer, and its decomposition, which is made once and kept in the output folder."""

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.settings import Settings
from compress.texts import Texts
from hf_comera import ComeraConfig, calibrate, get_comera_model
from hf_comera.compress.budget import sized_config
from hf_comera.hub.source import ModelSource, find_model
from hf_comera.training.whole_checkpoint import damage, writing

DECOMPOSED = "decomposed"
"""The folder within that of the run, gone when the run is complete."""


def find_dense(settings: Settings) -> ModelSource:
    """The model that the settings name.

    Raises:
        ValueError: If there is none, or it is compressed already.
    """
    source = find_model(settings.model)
    if source.settings is not None:
        raise ValueError(
            f"--model {settings.model} is compressed already. Give the dense model that it was made from."
        )
    return source


def load_dense(source: ModelSource) -> PreTrainedModel:
    """The dense model in float32, on the device of this process."""
    model: Any = source.load(dtype=torch.float32)
    return model.to(PartialState().device)


def decomposed(
    source: ModelSource,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    settings: Settings,
    console: Console,
) -> PreTrainedModel:
    """The model of the wanted size before any healing; of a run that goes on, the one that it began with.

    Raises:
        ValueError: If the size cannot be reached.
    """
    place = Path(settings.output_dir, DECOMPOSED)
    if not place.is_dir() or damage(place):
        chosen = texts.train[: settings.calibration_texts]
        console.print(f"Calibration on {len(chosen):,} texts, then decomposition to {settings.budget}.")
        calibration = calibrate(dense, chosen, processing_class=tokenizer)
        config = sized_config(dense, ComeraConfig(storage=storage_of(settings)), settings.size, calibration)
        model = get_comera_model(copy.deepcopy(dense), config, calibration=calibration)
        with writing(place) as unfinished:
            model.save_pretrained(unfinished, storage="float")
    model = source.model_class.from_pretrained(place)
    model.config.quantization_config.storage = storage_of(settings)  # of the checkpoint that is saved at the end
    return model.to(PartialState().device)


def storage_of(settings: Settings) -> str | None:
    """The setting of ``ComeraConfig``."""
    return None if settings.storage == "none" else settings.storage
