"""Parts of a composite model that have a config of their own, such as CLIP's towers: they save and load alone too."""

from typing import Any

from transformers import PreTrainedModel

from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.record import check_record
from hf_comera.modules import CompressedLayer

__all__ = ["adopt_parts", "compressed_parts"]


def compressed_parts(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The parts that hold compressed layers and do not share the config of what is around them, by name."""
    return {
        name: part
        for name, part in _parts(model).items()
        if any(isinstance(module, CompressedLayer) for module in part.modules())
    }


def adopt_parts(model: PreTrainedModel, config: ComeraConfig) -> None:
    """Record in ``config`` the layers that the configs of the parts record, if it knows none of ``model``.

    A model put together of compressed ones (``EncoderDecoderModel``) is saved without a record of its own, and
    Transformers hands on that of its decoder.

    Raises:
        ValueError: If an entry of those records cannot be.
    """
    names = {name for name, _ in model.named_modules()}
    if names.isdisjoint(config.layers or ()):
        config.layers = _layers_of_parts(model) or config.layers
        check_record(config.layers)  # configs of parts were not read through ComeraConfig.from_dict


def _layers_of_parts(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """All records of the parts, under the names that the layers have in ``model``."""
    found = {}
    for name, part in _parts(model).items():
        recorded = getattr(part.config, "quantization_config", None) or {}
        layers = recorded.get("layers") if isinstance(recorded, dict) else recorded.layers
        found |= {f"{name}.{layer}": entry for layer, entry in (layers or {}).items()}
    return found


def _parts(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    seen = {id(model.config)}
    parts = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            parts[name] = module
    return parts
