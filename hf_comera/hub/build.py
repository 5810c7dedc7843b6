"""``get_comera_model``: a compressed model from a live one, or from scratch without a dense weight in memory.

Cores are drawn so that dense entries get the deviation of the model's own initialiser. Architectures differ (0.02,
scaled by depth in GPT-2, by width in T5). So the initialiser runs on the meta device, where filling a tensor costs
nothing, and the distributions it asks for are recorded.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel

from hf_comera.compress.allotment import calibrated_plan, load_calibration, refuse_target
from hf_comera.compress.calibration import Calibration
from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.plan import CompressionPlan, plan
from hf_comera.compress.reports import warn_if_mostly_dense
from hf_comera.compress.selection import COMPRESSIBLE_TYPES
from hf_comera.compress.surgery import decompose_model, replace_layers
from hf_comera.hub.model import attach
from hf_comera.modules import CompressedLayer, TiedHead
from hf_comera.modules.base import edits_left_out

__all__ = ["get_comera_model", "initial_stds"]


def get_comera_model(
    model: Any,
    comera_config: ComeraConfig,
    *,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    token_counts: Tensor | None = None,
    calibration: Calibration | None = None,
) -> PreTrainedModel:
    """Compress a model, or build one in compressed form from the start.

    Args:
        model: A live dense model: its weights are decomposed in place. Or a model class, automatic
            (``AutoModelForMaskedLM``) or concrete: a new model with random cores is built; needs ``config``.
        comera_config: What to compress and how far.
        config: The Transformers config of a new model.
        dtype: Dtype of a new model; default is that of ``config``, or else float32.
        token_counts: ``(vocabulary,)``, how often each token occurs in the data, for a live model with
            ``embedding_width``: the factors of its embedding are then best for the tokens that are used.
        calibration: Statistics of a live model's layers, from :func:`calibrate`: the decomposition is then best for
            the outputs of its layers, not for the norm of its weights. With ``target_ratio`` or
            ``target_parameters`` it also decides the ranks.

    Returns:
        An ordinary Transformers model whose targeted layers are tensor trains, with the methods of
        :class:`hf_comera.hub.model.ComeraModel`. A live model is returned as the same object. A new one lives where
        a dense one would: on the meta device within ``torch.device("meta")`` or Accelerate's ``init_empty_weights``.

    Where less than half of the parameters is in compressed layers, a warning names the largest parts that are not.

    Raises:
        ValueError: If ``config``, ``token_counts`` or ``calibration`` is missing or superfluous, a setting does not
            fit, the wanted size cannot be reached, or the model is already compressed. A live model is then left as
            it was.

    Source:
        CoMERA, arXiv:2405.14377 (training in tensor-train form from the first step).
    """
    _check_fresh(comera_config)
    if isinstance(model, nn.Module):
        if config is not None or dtype is not None:
            raise ValueError(
                "config and dtype are for new models; a live model has both. Pass the model's class instead."
            )
        return _compress(model, comera_config, token_counts, calibration)
    if calibration is not None:
        raise ValueError(
            "calibration is for the trained weights of a live model, but a new model has none. Pass a live model, "
            "such as AutoModelForMaskedLM.from_pretrained(...), or calibration=None."
        )
    refuse_target(comera_config)
    if token_counts is not None:
        raise ValueError(
            "token_counts weigh the rows of a trained embedding, but a new model has none. Pass a live model, such as "
            "AutoModelForMaskedLM.from_pretrained(...), or token_counts=None."
        )
    if isinstance(model, str):
        raise ValueError(
            f"model={model!r} is a name. For its trained weights: AutoModel.from_pretrained({model!r}, "
            "quantization_config=comera_config); for random ones: get_comera_model(AutoModel, comera_config, "
            f"config=AutoConfig.from_pretrained({model!r}))."
        )
    if config is None:
        raise ValueError(
            f"A new {getattr(model, '__name__', model)} needs config=..., for example "
            'config=AutoConfig.from_pretrained("roberta-base").'
        )
    return _from_scratch(model, comera_config, config, dtype)


def _check_fresh(comera_config: Any) -> None:
    """Refuse what is no ``ComeraConfig`` of the user's own."""
    if isinstance(comera_config, PreTrainedConfig):
        raise ValueError(
            f"comera_config is a {type(comera_config).__name__}, but a ComeraConfig is needed before it: "
            "get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=30), config=config)."
        )
    if not isinstance(comera_config, ComeraConfig):
        raise ValueError(
            f"comera_config={comera_config!r} is needed as a ComeraConfig, for example ComeraConfig(rank=30)."
        )
    if comera_config.layers is not None:
        raise ValueError(
            "comera_config.layers is filled in by the library. Pass a fresh ComeraConfig with layers=None."
        )


def _compress(
    model: nn.Module, comera_config: ComeraConfig, token_counts: Tensor | None, calibration: Calibration | None
) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a Transformers PreTrainedModel. Compress the model inside it, or use the "
            "layers of hf_comera.modules directly."
        )
    if token_counts is not None and comera_config.embedding_width is None:
        raise ValueError(
            "token_counts are for factorized embeddings, but embedding_width=None. Use for example "
            "ComeraConfig(embedding_width=128), or token_counts=None."
        )
    if calibration is None:
        calibration = load_calibration(comera_config)
    compression = calibrated_plan(plan(model, comera_config), comera_config, calibration)
    errors = decompose_model(model, compression, token_counts, calibration)
    warn_if_mostly_dense(model)
    return attach(model, comera_config, errors)


def _from_scratch(
    model_class: Any, comera_config: ComeraConfig, config: PreTrainedConfig, dtype: torch.dtype | None
) -> PreTrainedModel:
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.random.fork_rng(devices=[]), _large_weights_on_meta():  # what is drawn here is drawn again below
        model = build(config, dtype=dtype) if dtype is not None else build(config)
    compression, device = plan(model, comera_config), _device_of_new_parameters()
    stds = initial_stds(model)
    replace_layers(model, compression, device="meta")
    if device.type != "meta":  # there nothing has values, as in a dense model
        model._apply(functools.partial(_allocate, device=device))
        _initialize(model, compression, stds)
    model.tie_weights()
    warn_if_mostly_dense(model)
    return attach(model.train(), comera_config)


def _device_of_new_parameters() -> torch.device:
    """Where layers that are made now have theirs: ``torch.device`` is not the only one to say so.

    Accelerate's ``init_empty_weights`` moves each parameter when it is registered.
    """
    return nn.LayerNorm(1).weight.device


@contextlib.contextmanager
def _large_weights_on_meta() -> Iterator[None]:
    """New linear layers and embeddings have weights without memory; all else is as its constructor makes it.

    Some models set small parameters, such as CLIP's ``logit_scale``, and buffers in ``__init__`` only.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        large = name == "weight" and isinstance(self, COMPRESSIBLE_TYPES)
        if large and param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _allocate(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a meta tensor, filled with NaN so that a parameter which nothing initialises is found."""
    if not tensor.is_meta:
        return tensor
    return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device=device)


def _initialize(model: PreTrainedModel, compression: CompressionPlan, stds: dict[str, float]) -> None:
    """Draw values for all parameters, in the way of the architecture."""
    for thing in (*model.modules(), *model.parameters()):
        thing.__dict__.pop("_is_hf_initialized", None)
    with edits_left_out():
        model.initialize_weights()
    _draw(model, compression, stds)
    _check_initialized(model)


def _check_initialized(model: PreTrainedModel) -> None:
    forgotten = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    if forgotten:
        raise ValueError(
            f"{type(model).__name__} does not initialise {', '.join(forgotten[:3])} in _init_weights, so it cannot be "
            "built without dense weights. Build the dense model and call get_comera_model(model, comera_config)."
        )


def _draw(model: PreTrainedModel, compression: CompressionPlan, stds: dict[str, float]) -> None:
    """Fill the cores so that the implied weights have the deviations that the architecture asks for."""
    for layer in compression.layers:
        module = model.get_submodule(layer.name)
        assert isinstance(module, CompressedLayer)
        std = stds.get(f"{layer.name}.weight")
        module.reset_parameters(std) if std else module.reset_parameters()
    for module in model.modules():
        if isinstance(module, TiedHead):
            module.reset_parameters()


def initial_stds(model: PreTrainedModel) -> dict[str, float]:
    """Standard deviation of the initial entries of each parameter of a model on the meta device.

    Parameters that no initialiser of the architecture fills are left out.
    """
    recorder = _RecordDistributions()
    with recorder, torch.no_grad():
        _initialize_as_dense(model, model)
    return {
        name: recorder.stds[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in recorder.stds
    }


def _initialize_as_dense(module: nn.Module, owner: PreTrainedModel) -> None:
    """Initialise as Transformers does: children before parents, each by the nearest model above it.

    A vision tower inside a language model has deviations of its own, and the model around both may have none.
    """
    for child in module.children():
        _initialize_as_dense(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)


class _RecordDistributions(TorchDispatchMode):
    """Follows in-place fills of meta tensors and keeps the deviation each tensor would have."""

    def __init__(self) -> None:
        super().__init__()
        self.stds: dict[int, float] = {}
        self._alive: list[Tensor] = []  # ids are only unique among living objects

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        update = _UPDATES.get(func._schema.name)
        if update is not None and isinstance(args[0], Tensor):
            tensor = args[0]
            self._alive.append(tensor)
            self.stds[id(tensor)] = update(self.stds.get(id(tensor), 0.0), list(args[1:]), kwargs)
        return func(*args, **kwargs)


def _normal(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("std", 1.0))


def _uniform(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    low = args[0] if args else kwargs.get("from", 0.0)
    high = args[1] if len(args) > 1 else kwargs.get("to", 1.0)
    return float(high - low) / math.sqrt(12.0)


def _erfinv(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    """``trunc_normal_`` of torch maps a uniform draw on (-1, 1) through erfinv: a normal of deviation 1/sqrt(2)."""
    return math.sqrt(0.5)


def _scale(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    return std * abs(float(args[0])) if not isinstance(args[0], Tensor) else std


def _constant(std: float, args: list[Any], kwargs: dict[str, Any]) -> float:
    return 0.0


_UPDATES: dict[str, Callable[[float, list[Any], dict[str, Any]], float]] = {
    "aten::normal_": _normal,
    "aten::uniform_": _uniform,
    "aten::erfinv_": _erfinv,
    "aten::mul_": _scale,
    "aten::fill_": _constant,
    "aten::zero_": _constant,
}
