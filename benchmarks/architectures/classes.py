"""The architectures of Transformers: every model type that an automatic class knows, and one class for each."""

from functools import cache
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

__all__ = ["kind_of", "model_class", "model_types"]

KINDS = (
    ("sequence to sequence", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("speech to text", "SPEECH_SEQ_2_SEQ"),
    ("masked language", "MASKED_LM"),
    ("image and text", "IMAGE_TEXT_TO_TEXT"),
    ("causal language", "CAUSAL_LM"),
    ("CTC", "CTC"),
    ("image and text", "MULTIMODAL_LM"),
    ("image and text", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    ("image", "IMAGE_CLASSIFICATION"),
    ("sound", "AUDIO_CLASSIFICATION"),
    ("detection", "OBJECT_DETECTION"),
    ("segmentation", "SEMANTIC_SEGMENTATION"),
    ("segmentation", "UNIVERSAL_SEGMENTATION"),
    ("depth", "DEPTH_ESTIMATION"),
    ("video", "VIDEO_CLASSIFICATION"),
    ("time series", "TIME_SERIES_PREDICTION"),
    ("text to speech", "TEXT_TO_SPECTROGRAM"),
    ("base model", ""),
)
"""What a class is for, and the table of Transformers that names it; a model type has the class of its first table."""
NOT_SWEPT = {"timm_backbone", "timm_wrapper"}
"""They wrap models of the package timm, which the project does not need."""


@cache
def model_types() -> list[str]:
    """All model types of the automatic classes, in alphabetical order."""
    return sorted({model_type for table in _all_tables() for model_type in table} - NOT_SWEPT)


def model_class(model_type: str) -> type[PreTrainedModel]:
    """The class that is swept: that of the first table of ``KINDS``, else of the first table that has one."""
    return getattr(transformers, _class_name(model_type))


def kind_of(model_type: str) -> str:
    """What the class is for."""
    return next((kind for kind, task in KINDS if model_type in _table(task)), "another task")


def _class_name(model_type: str) -> str:
    tables = [*(_table(task) for _, task in KINDS), *_all_tables()]
    name = next(table[model_type] for table in tables if model_type in table)
    return name if isinstance(name, str) else name[0]


def _all_tables() -> list[dict[str, Any]]:
    names = [name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")]
    return [getattr(modeling_auto, name) for name in names]


def _table(task: str) -> dict[str, Any]:
    return getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES")
