"""Load-time integration: Transformers finds ``comera`` as a quantization method, and this builds the layers.

Two ways through ``from_pretrained``. A compressed checkpoint: tensor-train layers replace the dense ones on the meta
device, then the file fills them. A dense checkpoint with ``quantization_config=ComeraConfig(...)``: each weight is
decomposed as it arrives, one at a time. After loading, nothing of the quantizer stays on the model.
"""

import copy
import logging
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from hf_comera.compress.allotment import calibrated_plan, load_calibration
from hf_comera.compress.calibration import Calibration
from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.plan import CompressionPlan, plan
from hf_comera.compress.reports import warn_if_mostly_dense
from hf_comera.compress.storage import unpacked
from hf_comera.compress.surgery import decompose_layer, link_tied, replace_layers, shift_bias, untie
from hf_comera.hub.checkpoint import NOTICE, PackedTensor, check_checkpoint, is_dense_checkpoint
from hf_comera.hub.model import adopt_parts, attach, guard_keys
from hf_comera.modules import CompressedLayer, TensorTrainModule, TiedHead
from hf_comera.modules.base import edits_left_out
from hf_comera.ops.quantization import PACKED_DTYPES

__all__ = ["ComeraQuantizer", "register"]

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 64


class ComeraQuantizer(HfQuantizer):
    """Puts tensor-train layers into a model while Transformers loads it."""

    requires_calibration = False
    quantization_config: ComeraConfig

    def __init__(self, quantization_config: ComeraConfig, **kwargs: Any) -> None:
        """Made by Transformers, once per load."""
        super().__init__(quantization_config, **kwargs)
        self.plan: CompressionPlan | None = None
        self.is_dense = False
        """Whether a dense model wrote the files, though the config is that of a compressed one."""
        self.errors: dict[str, dict[str, float]] = {}
        self.shifts: dict[str, Tensor | None] = {}
        """To be added to the biases when all have come, of dense weights decomposed in the metric of the outputs."""
        self.calibration: Calibration | None = None
        self.missing: list[nn.Module] = []
        self.load_dtype: torch.dtype | None = None
        self.shapes: dict[str, torch.Size] = {}
        self.packed: dict[str, PackedTensor] | None = None
        """Weights in int8 or int4, by the names that the files have; None where a state was handed over."""

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The only place where the dtype of the load is told."""
        self.load_dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        if self.pre_quantized:
            adopt_parts(model, self.quantization_config)
            self.is_dense = is_dense_checkpoint(checkpoint_files or ())
            if not self.is_dense and checkpoint_files:  # there are none where a state was handed over
                self.packed = check_checkpoint(checkpoint_files, self.quantization_config)
        self.plan = plan(model, self.quantization_config)
        if not self.pre_quantized:
            self.calibration = load_calibration(self.quantization_config)
            self.plan = calibrated_plan(self.plan, self.quantization_config, self.calibration)
        for part in _parts(model):
            part.__dict__["_initialize_weights"] = types.MethodType(_initialize_weights(self, model), part)
        if self.is_dense:
            return model
        if self.pre_quantized:
            replace_layers(model, self.plan, device="meta")
            _keep_gates_exact(model)
            _ignore(model, (NOTICE, *guard_keys(self.quantization_config)))
            _check_packed_shapes(model, self.packed or {})
            self.shapes = {name: p.shape for name, p in model.named_parameters() if not _is_train_parameter(name)}
        else:
            untie(model, self.plan.ties)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Unpack weights that are stored in int8 or int4; expect the names that conversions give to empty tensors."""
        model = args[0] if args else kwargs.get("model")  # earlier releases of Transformers do not tell it
        if self.pre_quantized and not self.is_dense and model is not None:
            conversions = copy.deepcopy(weight_conversions)  # each notes whether it was used
            renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
            converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
            keys = guard_keys(self.quantization_config)
            _ignore(model, [rename_source_key(key, renamings, converters)[0] for key in keys])
        if self.pre_quantized and not self.is_dense and self.quantization_config.packs:
            weight_conversions = self._with_unpacking(weight_conversions)
        return super().update_weight_conversions(weight_conversions, *args, **kwargs)

    def _with_unpacking(self, weight_conversions: list[Any]) -> list[Any]:
        """``weight_conversions``, and before them one for the packed tensors, or behind them one for all tensors."""
        if self.packed is None:
            return [*weight_conversions, WeightConverter([r"^(.+)$"], [r"\1"], [_Unpack(self)])]
        renamings = [entry for entry in copy.deepcopy(weight_conversions) if isinstance(entry, WeightRenaming)]
        names = sorted({rename_source_key(name, renamings, [])[0] for name in self.packed})
        if not names:
            return weight_conversions
        pattern = "|".join(map(re.escape, names))
        return [WeightConverter([rf"^({pattern})$"], [r"\1"], [_Unpack(self)]), *weight_conversions]

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Dense weights that are to be decomposed; of a compressed file the cores, whose ranks the file decides."""
        assert self.plan is not None
        module_name, _, parameter = param_name.rpartition(".")
        if _is_train_parameter(param_name):
            module_name = module_name.removesuffix(".table")  # of a factorized embedding
        wanted = _is_train_parameter(param_name) if self.pre_quantized else parameter == "weight"
        return wanted and not self.is_dense and module_name in self.plan.by_name

    def get_quantize_ops(self) -> ConversionOps:
        """The operation on a dense weight that arrives."""
        return _Decompose(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for part in _parts(model):
            part.__dict__.pop("_initialize_weights", None)
        _forget_unpacking(model)
        self._refuse_missing(model)
        if self.is_dense:
            return self._leave_dense(model)
        for name, shift in self.shifts.items():
            shift_bias(model.get_submodule(name), shift)
        self._warn_of_dense_layers(model)
        _check_bonds(model)
        _check_shapes(model, self.shapes)
        if self.load_dtype is not None and not hasattr(HfQuantizer, "get_new_dtype"):
            _cast(model, self.load_dtype)
        _align(model)
        _freeze_removed(model)
        if not self.pre_quantized:
            warn_if_mostly_dense(model)
        return attach(model, self.quantization_config, self.errors)

    def _refuse_missing(self, model: PreTrainedModel) -> None:
        """A layer that the record lists must have come whole: nothing else of a compressed model is drawn again."""
        if not self.missing:
            return
        names = [name for name, module in model.named_modules() if any(module is lost for lost in self.missing)]
        parts = "dense weights" if self.is_dense else "cores, gates or biases"
        raise ValueError(
            f"The checkpoint lacks {parts} of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}, though "
            "its config.json lists them. It is damaged or foreign: copy it again, save it again with "
            "model.save_pretrained, or load it with the class that saved it."
        )

    def _leave_dense(self, model: PreTrainedModel) -> PreTrainedModel:
        """A dense model, made from the config of a compressed one, that was saved with the record still in it."""
        logger.warning(
            "%s holds the dense weights of every layer that its config.json lists as compressed, so a dense model is "
            "loaded. Saving it again removes the list. To compress it, call get_comera_model(model, comera_config).",
            model.name_or_path,
        )
        for name in ("hf_quantizer", "quantization_method"):
            model.__dict__.pop(name, None)
        model.is_quantized = False  # type: ignore[assignment]
        for part in _parts(model):
            part.config.__dict__.pop("quantization_config", None)
        return model

    def _warn_of_dense_layers(self, model: PreTrainedModel) -> None:
        """Of a dense checkpoint that lacks targeted layers, say for another head, nothing was decomposed there."""
        assert self.plan is not None
        dense = [x.name for x in self.plan.layers if not isinstance(model.get_submodule(x.name), CompressedLayer)]
        if dense:
            logger.warning(
                "%d targeted layers are not in the checkpoint and stay dense, for example %s. To compress them too, "
                "load the dense model and call get_comera_model(model, comera_config).", len(dense), dense[0],
            )  # fmt: skip

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Compressed models save."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Compressed models train."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Compressed models train in full."""
        return True

    @property
    def is_compileable(self) -> bool:
        """The layers are traceable."""
        return True


class _Decompose(ConversionOps):
    """Turns one dense weight into a tensor-train layer, in place of the dense layer."""

    def __init__(self, quantizer: ComeraQuantizer) -> None:
        self.quantizer = quantizer

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str,
        model: PreTrainedModel,
        missing_keys: set[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Decompose the one weight in ``input_dict``; returns nothing that the loader would still have to set."""
        if len(input_dict) != 1:
            raise ValueError(
                f"{full_layer_name} is made of {len(input_dict)} tensors of the checkpoint, which cannot be "
                "decomposed while they arrive. Load the dense model, and call get_comera_model(model, comera_config)."
            )
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        name = full_layer_name.rpartition(".")[0]
        compression = self.quantizer.plan
        assert compression is not None
        layer = compression.by_name[name]
        new, self.quantizer.errors[name], self.quantizer.shifts[name] = decompose_layer(
            layer, model.get_submodule(name), weight, calibration=self.quantizer.calibration
        )
        for core in new.cores():
            # the loader draws new values for parameters without this mark
            core._is_hf_initialized = True  # type: ignore[attr-defined]
        new._is_hf_initialized = True  # type: ignore[assignment]
        model.set_submodule(name, new)
        ties = {tied: source for tied, source in compression.ties.items() if source == name}
        link_tied(model, ties)
        missing_keys.difference_update({full_layer_name, *(f"{tied}.weight" for tied in ties)})
        return {}


class _Unpack(ConversionOps):
    """Turns a weight in int8 or int4 rows into the floating-point numbers that it stands for; leaves all else."""

    def __init__(self, quantizer: ComeraQuantizer) -> None:
        self.load_dtype: Any = quantizer.load_dtype

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: PreTrainedModel, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Unpack the one tensor in ``input_dict``."""
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        like = model.get_parameter_or_buffer(full_layer_name)
        if tensor.dtype in PACKED_DTYPES and like.is_floating_point():
            exact = any(re.search(key, full_layer_name) for key in _kept_in_float32(model, self.load_dtype))
            tensor = unpacked(full_layer_name, tensor, like, torch.float32 if exact else self.load_dtype)
        return {full_layer_name: tensor}


def register() -> None:
    """Make ``comera`` known to Transformers; a second call (a reload of the package) replaces the first."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.pop("comera", None)
    AUTO_QUANTIZER_MAPPING.pop("comera", None)
    register_quantization_config("comera")(ComeraConfig)
    register_quantizer("comera")(ComeraQuantizer)


def _parts(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _initialize_weights(quantizer: ComeraQuantizer, model: PreTrainedModel) -> Any:
    """Stands in for ``PreTrainedModel._initialize_weights``, which does not know tensor-train layers."""
    assert quantizer.plan is not None
    dense = {id(model.get_submodule(layer.name)) for layer in quantizer.plan.layers if quantizer.is_dense}

    def initialize(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, TiedHead):
            if not getattr(module.bias, "_is_hf_initialized", False):
                module.reset_parameters()
        elif isinstance(module, CompressedLayer):
            if not _has_come(module.parameters(recurse=False)):
                module.reset_parameters()
                quantizer.missing.append(module)
        else:
            if id(module) in dense and not _has_come([module.weight]):
                quantizer.missing.append(module)
            with edits_left_out():
                type(self)._initialize_weights(self, module, *args, **kwargs)

    return initialize


def _has_come(parameters: Iterable[Any]) -> bool:
    """Whether the file had all of ``parameters``; those on the meta device are read when they are needed."""
    return all(getattr(parameter, "_is_hf_initialized", False) or parameter.is_meta for parameter in parameters)


def _is_train_parameter(name: str) -> bool:
    """Cores and gates, whose ranks the file decides."""
    return name.rpartition(".")[2].startswith(("core_", "rank_gate_"))


def _keep_gates_exact(model: PreTrainedModel) -> None:
    """Gates stay float32 when the model is loaded in 16 bits."""
    for part in _parts(model):
        part._keep_in_fp32_modules_strict = set(part._keep_in_fp32_modules_strict or ()) | {r"rank_gate_\d+"}


def _ignore(model: PreTrainedModel, keys: Iterable[str]) -> None:
    """The empty tensors that stop plain Transformers are expected here, with a base-model prefix more or less."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    names = {name for key in keys for name in (key, key.removeprefix(prefix), prefix + key)}
    kept = set(model._keys_to_ignore_on_load_unexpected or ())
    # a conversion may have lengthened a name
    model._keys_to_ignore_on_load_unexpected = kept | {rf"^{re.escape(name)}(\.|$)" for name in names}


def _check_packed_shapes(model: PreTrainedModel, packed: dict[str, PackedTensor]) -> None:
    """Refuse packed tensors of other shapes before a weight is read; those that get another name are met later."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    shapes = {name: tensor.shape for name, tensor in model.named_parameters(remove_duplicate=False)}
    for key, tensor in packed.items():
        for name in (key, key.removeprefix(prefix), prefix + key):
            if name in shapes:
                tensor.check(key, shapes[name], any_rank=_is_train_parameter(name))
                break


def _forget_unpacking(model: PreTrainedModel) -> None:
    """Saving would reverse it; packing is no part of that.

    Raises:
        ValueError: If a conversion of the architecture kept a packed weight from being unpacked.
    """
    conversions: Any = getattr(model, "_weight_conversions", None)
    if conversions:
        model.__dict__["_weight_conversions"] = [entry for entry in conversions if not _unpacks(entry)]
    for name, parameter in model.named_parameters():
        if parameter.dtype in PACKED_DTYPES:
            raise ValueError(
                f"{name} is stored in int8 or int4, and its name is not that of this model in this release of "
                'Transformers. Load it with the release that saved it, and save it with storage="float".'
            )


def _unpacks(conversion: Any) -> bool:
    return any(isinstance(operation, _Unpack) for operation in getattr(conversion, "operations", ()))


def _check_bonds(model: nn.Module) -> None:
    """Cores come from the file with any rank; neighbours must agree, and factors must be those of the config."""
    for name, module in model.named_modules():
        if not isinstance(module, TensorTrainModule):
            continue
        cores = module.cores()
        lefts, rights = [core.shape[0] for core in cores], [core.shape[-1] for core in cores]
        covered = [size for core in cores for size in core.shape[1:-1]]
        gates = [gate.numel() for gate in module.rank_gates()]
        fits = lefts[0] == 1 and rights[-1] == 1 and lefts[1:] == rights[:-1] and gates in ([], rights[:-1])
        if not fits or covered != module.expected_factors():
            raise ValueError(
                f"The cores of {name!r} have shapes {[tuple(core.shape) for core in cores]} and gates {gates}, which "
                f"do not fit together or not the factors {module.expected_factors()} of config.json. The checkpoint "
                "is damaged."
            )


def _check_shapes(model: nn.Module, expected: dict[str, torch.Size]) -> None:
    """Transformers 5.17 takes any shape of any parameter while a quantizer is there; later ones raise themselves."""
    for name, parameter in model.named_parameters():
        if name in expected and parameter.shape != expected[name]:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)} in the checkpoint, but the model needs "
                f"{tuple(expected[name])}. The checkpoint is damaged or belongs to another config.json."
            )


def _align(model: nn.Module) -> None:
    """Own, aligned memory for parameters that are views of the mapped file.

    Products round differently at other alignments, so a reloaded model would differ from the saved one in last bits.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT_BYTES:
            parameter.data = parameter.data.clone()


def _freeze_removed(model: nn.Module) -> None:
    """Parameters without entries ask for no gradient: DDP would wait for it."""
    for parameter in model.parameters():
        if parameter.numel() == 0:
            parameter.requires_grad_(False)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Early releases that we support (5.17) leave keys that they rename in the dtype of the file."""
    keep = _kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and not any(re.search(key, name) for key in keep):
            parameter.data = parameter.data.to(dtype)


def _kept_in_float32(model: PreTrainedModel, dtype: Any) -> list[str]:
    """Expressions for parameters that an architecture wants in float32, whatever the model is loaded in."""
    return [key.replace(".", r"\.") for key in model._get_dtype_plan(dtype)]
