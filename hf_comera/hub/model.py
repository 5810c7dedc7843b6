"""Methods of a compressed model beyond its Transformers class: save with a guard, report sizes, merge back to dense.

The model is never wrapped. Its class becomes a subclass of its own class, under the same name, so that everything of
Transformers still works on it and ``super()`` is the original.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_comera.compress import reports
from hf_comera.compress.config import ComeraConfig, check_storage
from hf_comera.compress.plan import CompressionPlan, LayerPlan
from hf_comera.compress.record import check_record, record_digest
from hf_comera.compress.reports import RankReport, rank_report, size_report
from hf_comera.compress.storage import check_storage_names, packed_state, unpack_state
from hf_comera.compress.surgery import merge_model
from hf_comera.hub.checkpoint import NOTICE, RECORDS, SAVE_ID, atomic_save, new_save_id, stamped
from hf_comera.memory import ActivationPolicy, set_activation_policy
from hf_comera.modules import (
    CompressedLayer,
    FactorizedEmbedding,
    TiedEmbedding,
    TiedHead,
    TTLinear,
    TTMEmbedding,
    compressed_layers,
)
from hf_comera.modules.fusion import fuse, unfuse
from hf_comera.modules.head_and_loss import LANGUAGE_MODELS, HeadAndLoss, head_and_loss_forward, set_head_and_loss

__all__ = ["ComeraModel", "adopt_parts", "attach", "compressed_parts", "is_comera_model", "merge_and_unload"]

TAGS = ["comera", "tensor-train"]
"""How the Hub can find compressed models."""

TRAINING_CHECKPOINT = re.compile(r"checkpoint-\d+")
"""How the Trainer of Transformers names the folders that it resumes from."""

logger = logging.getLogger(__name__)

# A decomposition that loses more than this of a layer computes something else until it is trained.
ERROR_WORTH_A_WARNING = 0.3


if TYPE_CHECKING:  # stands for the model's own class
    _OwnClass = PreTrainedModel
else:
    _OwnClass = object


class ComeraModel(_OwnClass):
    """Methods of every compressed model; the other base class is the model's own."""

    _dense_class: type[PreTrainedModel]

    def save_pretrained(  # type: ignore[override]  # the rest is given by name
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        storage: str | dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save compact safetensors and ``config.json``; nothing in the folder changes before all is written.

        Weights are stored as ``storage`` says, or else ``ComeraConfig.storage``: as int8 or int4, or as they are. Such
        a checkpoint loads as any other. Saved again in the same dtype, it has the same bytes. Folders named
        ``checkpoint-<step>`` keep the weights as they are unless ``storage`` is given: training resumes from them.

        The file also holds an empty tensor under the name of every dense weight. Transformers without hf_comera, and
        classes for a part of the model, would otherwise load random weights with a mere warning; so they raise for a
        size mismatch. The name of one more empty tensor says what to import.

        Args:
            save_directory: Made if missing.
            is_main_process: Whether this process writes.
            state_dict: The tensors to save, where they are not those of this object.
            storage: For this checkpoint alone: a value of ``ComeraConfig.storage``.
            **kwargs: Of Transformers' ``save_pretrained``.

        Raises:
            ValueError: If a tied head or embedding computes with an embedding that is not in the model; if ``storage``
                is none, or a weight cannot be stored so.
            OSError: If the folder cannot be written; the checkpoint that is there stays whole.
        """
        _check_ties(self)
        with _storage_of_one_save(self, storage):
            self._save(
                save_directory, is_main_process, state_dict, packs=self._packs(save_directory, storage), **kwargs
            )

    def _refuse_plain_floats(self) -> None:
        """A model that has nothing but its storage, and is not to have that, is no compressed model."""
        config = self.config.quantization_config
        if not config.layers and not config.packs:
            raise ValueError(
                f"This {type(self).__name__} has no compressed layer, so with weights as they are it is an ordinary "
                "model: model.merge_and_unload().save_pretrained(folder)."
            )

    def _packs(self, save_directory: str | os.PathLike[str], storage: Any) -> bool:
        """Whether weights are stored as integers in this folder; adapters of PEFT, saved alone, never are."""
        resumed = storage is None and TRAINING_CHECKPOINT.fullmatch(Path(save_directory).name)
        adapters = getattr(self, "_hf_peft_config_loaded", False)
        return self.config.quantization_config.packs and not resumed and not adapters

    def _save(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool,
        state_dict: dict[str, Tensor] | None,
        packs: bool,
        **kwargs: Any,
    ) -> None:
        _record_all_layers(self)
        self._refuse_plain_floats()
        state_dict = dict(self.state_dict() if state_dict is None else state_dict)
        if packs and kwargs.get("distributed_checkpoint"):
            raise ValueError(
                "distributed_checkpoint=True writes parts of tensors, and only whole weights are stored in int8 or "
                'int4. Leave it out, or save with storage="float".'
            )
        if packs and is_main_process:
            state_dict = packed_state(self, state_dict, self.config.quantization_config.storage)
        guards = (NOTICE, *guard_keys(self.config.quantization_config))
        state_dict |= {key: torch.empty(0, dtype=self.dtype) for key in guards}
        # conversions to the names of an original release split, join and rename dense weights; cores would be lost
        kwargs["save_original_format"] = False
        save: Callable[..., None] = functools.partial(
            super().save_pretrained, is_main_process=is_main_process, state_dict=state_dict, **kwargs
        )
        if kwargs.get("distributed_checkpoint"):
            save(save_directory)  # every rank writes its own part: there is no one moment to rename
            return
        with stamped(self, state_dict, _new_stamp(self)):
            atomic_save(save, save_directory, kwargs)

    def comera_plan(self) -> CompressionPlan:
        """The compressed layers with true ranks and, where measured, the error of each decomposition. Print it."""
        report = size_report(self)
        recorded = self.config.quantization_config.layers
        layers = [
            _layer_plan(name, module, recorded.get(name, {})) for name, module in compressed_layers(self).items()
        ]
        return CompressionPlan(layers=layers, dense_parameters=report.dense_parameters)

    def print_trainable_parameters(self) -> None:
        """Print parameters and bytes, dense and compressed, and the ratios."""
        reports.print_trainable_parameters(self)

    def rank_report(self) -> RankReport:
        """Ranks of every layer before and after rank adaptation, the size over the steps. Print it, or plot it."""
        return rank_report(self)

    def set_activation_policy(self, policy: str | ActivationPolicy | None) -> None:
        """Decide what becomes of the tensors that autograd keeps: see ``hf_comera.set_activation_policy``.

        Raises:
            ValueError: If there is no policy of that name.
        """
        set_activation_policy(self, policy)

    def set_head_and_loss(self, enabled: bool = True) -> None:
        """Compute head and loss as one block while training, or not: see ``hf_comera.set_head_and_loss``.

        Raises:
            ValueError: If there is no block for this model.
        """
        set_head_and_loss(self, enabled)

    def merge_and_unload(self) -> PreTrainedModel:
        """Turn this model into an ordinary dense one, in place, and return it; it then saves as any other model."""
        return merge_and_unload(self)

    def dequantize(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Transformers' name for :meth:`merge_and_unload`.

        Args:
            dtype: What the dense model is cast to; default is the dtype that the model has.
        """
        model = merge_and_unload(self)
        return model if dtype is None else model.to(dtype)  # type: ignore[arg-type]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Not possible for a compressed embedding; raises unless nothing would change."""
        embedding = self.get_input_embeddings()
        if not isinstance(embedding, TTMEmbedding | FactorizedEmbedding):
            return super().resize_token_embeddings(*args, **kwargs)
        asked = {**dict(zip(("new_num_tokens", "pad_to_multiple_of"), args, strict=False)), **kwargs}
        multiple = asked.get("pad_to_multiple_of") or 1
        new_size = -(-(asked.get("new_num_tokens") or embedding.num_embeddings) // multiple) * multiple
        if new_size == embedding.num_embeddings:
            return embedding
        raise ValueError(self._how_to_resize(embedding, new_size))

    def _how_to_resize(self, embedding: TTMEmbedding | FactorizedEmbedding, new_size: int) -> str:
        (name,) = (name for name, module in self.named_modules() if module is embedding)
        dense = f"ComeraConfig(exclude_modules=[{name.rpartition('.')[2]!r}], ...)"
        return (
            f"resize_token_embeddings({new_size}): the embedding {name!r} is compressed with "
            f"{embedding.num_embeddings} rows. Call model.merge_and_unload(), resize, and compress again with "
            f"get_comera_model(model, {dense}), which leaves the embedding dense, so that it keeps its values and "
            "can grow."
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Of a file, the empty tensor that says what to import is no part of the state, and weights may be packed."""
        state_dict.pop(prefix + NOTICE, None)
        unpack_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and deep-copy through the model's own class, since the subclass has no importable name."""
        return _new_instance, (self._dense_class,), self.__dict__.copy()


@contextlib.contextmanager
def _storage_of_one_save(model: PreTrainedModel, storage: Any) -> Iterator[None]:
    """Within, ``storage``, if given, is that of the configs of ``model`` and its parts.

    Raises:
        ValueError: If it is none, or a pattern matches no layer.
    """
    if storage is None:
        yield
        return
    check_storage(storage)
    check_storage_names(model, storage)
    configs = [part.config.quantization_config for part in _marked(model)]
    before = [config.storage for config in configs]
    try:
        for config in configs:
            config.storage = storage
        yield
    finally:
        for config, setting in zip(configs, before, strict=True):
            config.storage = setting


def is_comera_model(model: Any) -> bool:
    """Whether ``model`` is a compressed model of this library."""
    return isinstance(model, ComeraModel)


def attach(
    model: PreTrainedModel, config: ComeraConfig, errors: dict[str, dict[str, float]] | None = None
) -> PreTrainedModel:
    """Make a model with tensor-train layers a compressed model: its class, its config, no trace of a quantizer.

    Transformers refuses to train, cast or save "quantized" models in several places; this one is an ordinary model
    that merely carries its config for the next load.

    Raises:
        ValueError: If a pattern of a new config's ``storage`` matches no layer.
    """
    for name in ("hf_quantizer", "quantization_method"):
        model.__dict__.pop(name, None)
    model.is_quantized = False  # type: ignore[assignment]
    if config.layers is None:  # a new one, not that of a checkpoint, of which this may be a part
        check_storage_names(model, config.storage)
    _own_config(model)
    layers = {**(config.layers or {}), **(errors or {})}
    _mark(model, dataclasses.replace(config, layers=layers))
    for name, part in compressed_parts(model).items():
        inside = {key.removeprefix(f"{name}."): entry for key, entry in layers.items() if key.startswith(f"{name}.")}
        _mark(part, dataclasses.replace(config, layers=inside))
    _warn_of_errors(errors or {})
    _record_all_layers(model)
    fuse(model)
    if isinstance(HeadAndLoss.of(model), HeadAndLoss):
        set_head_and_loss(model)
    return model


def _mark(model: PreTrainedModel, config: ComeraConfig) -> None:
    """Give ``model`` the methods of a compressed one, and its config."""
    model.config.quantization_config = config
    # read by FlashAttention's dtype rule only, which otherwise looks for an nn.Linear; not written to config.json
    model.config._is_quantized = True
    model.__class__ = _comera_class(getattr(model, "_dense_class", type(model)))  # type: ignore[arg-type]
    model.add_model_tags(TAGS)  # for the card of a plain model.push_to_hub


def merge_and_unload(model: PreTrainedModel) -> PreTrainedModel:
    """Turn a compressed model into an ordinary dense one, in place, and return it.

    Raises:
        ValueError: If ``model`` is not compressed.
    """
    if not is_comera_model(model):
        raise ValueError(f"{type(model).__name__} is not a compressed model: there is nothing to merge.")
    marked = _marked(model)
    merge_model(model)
    unfuse(model)
    set_head_and_loss(model, False)
    for part in marked:
        _unmark(part)
    return model


def _marked(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model, and its parts that can save themselves."""
    return [model, *filter(is_comera_model, compressed_parts(model).values())]


def _unmark(model: PreTrainedModel) -> None:
    model.__class__ = model._dense_class  # type: ignore[assignment]
    model.model_tags = [tag for tag in model.model_tags or () if tag not in TAGS] or None
    del model.config.quantization_config
    model.config.__dict__.pop("_is_quantized", None)


def guard_keys(config: ComeraConfig) -> list[str]:
    """Names of the dense weights, under which a checkpoint stores empty tensors."""
    return [f"{name}.weight" for name in sorted(config.layers or {})]


def _check_ties(model: PreTrainedModel) -> None:
    parts = set(map(id, model.modules()))
    for name, module in model.named_modules():
        if isinstance(module, TiedHead | TiedEmbedding) and id(module.source) not in parts:
            raise ValueError(
                f"{name!r} computes with the cores of an embedding that is not in this {type(model).__name__}, so "
                "they would not be saved. Of a part, save the whole model. If the embedding was replaced, put it back "
                "(model.set_input_embeddings), or merge the model (model.merge_and_unload()), change it and compress "
                "it again."
            )


def _own_config(model: PreTrainedModel) -> None:
    """A copy of the config, also in the parts that share it: the one that was given may make other models."""
    copies: dict[int, Any] = {}
    model.config = copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                module.__dict__[name] = copies[id(value)]


def _warn_of_errors(errors: dict[str, dict[str, float]]) -> None:
    """Say so where much is lost; the norm of a weight says nothing where the outputs' error is known."""
    plain = {name: found["error"] for name, found in errors.items() if "output_error" not in found}
    large = {name: error for name, error in plain.items() if error > ERROR_WORTH_A_WARNING}
    if large:
        worst = max(large, key=large.__getitem__)
        logger.warning(
            "The decomposition lost more than %.0f %% of the norm of %d of %d layers (most in %s: %.0f %%). Give it a "
            "calibration (calibrate(model, batches)), which keeps what the outputs need, and train or heal the model "
            "before using it; print(model.comera_plan()) lists the error of every layer.",
            100 * ERROR_WORTH_A_WARNING,
            len(large),
            len(errors),
            worst,
            100 * large[worst],
        )


def _record_all_layers(model: PreTrainedModel) -> None:
    for part in _marked(model):
        _record_layers(part)


def _record_layers(model: PreTrainedModel) -> None:
    """Write the true factors and ranks of all layers into the config."""
    config = model.config.quantization_config
    recorded = config.layers or {}
    config.layers = {
        name: _layer_plan(name, module, recorded.get(name, {})).to_json()
        for name, module in compressed_layers(model).items()
    }


def _new_stamp(model: PreTrainedModel) -> dict[str, str]:
    """Metadata for the weight files of the save that begins; the configs take the id on."""
    save_id = new_save_id()
    configs = [part.config.quantization_config for part in _marked(model)]
    for config in configs:
        config.save_id = save_id
    return {SAVE_ID: save_id, RECORDS: " ".join(record_digest(config.layers) for config in configs)}


def _layer_plan(name: str, module: CompressedLayer, recorded: dict[str, Any]) -> LayerPlan:
    kind, (in_size, out_size) = "ttm_embedding", module.weight_shape()
    if isinstance(module, TTLinear):
        kind, in_size, out_size = "tt_linear", module.in_features, module.out_features
    elif isinstance(module, FactorizedEmbedding):
        kind = "factorized_embedding"
    return LayerPlan(
        name=name,
        kind=kind,
        in_size=in_size,
        out_size=out_size,
        in_factors=module.in_factors,
        out_factors=module.out_factors,
        ranks=module.ranks,
        error=recorded.get("error"),
        output_error=recorded.get("output_error"),
        rank_gates=bool(module.rank_gates()),
        width=module.width if isinstance(module, FactorizedEmbedding) else None,
    )


@functools.cache
def _comera_class(dense_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    names: dict[str, Any] = {"__module__": dense_class.__module__, "__qualname__": dense_class.__qualname__}
    if dense_class.__name__.endswith(LANGUAGE_MODELS):
        names["forward"] = head_and_loss_forward(dense_class.forward)
    return type(
        dense_class.__name__,
        (ComeraModel, dense_class),
        {**names, "__doc__": dense_class.__doc__, "_dense_class": dense_class},
    )


def _new_instance(dense_class: type[PreTrainedModel]) -> Any:
    cls = _comera_class(dense_class)  # type: ignore[arg-type]
    return cls.__new__(cls)


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
    found: dict[str, dict[str, Any]] = {}
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
