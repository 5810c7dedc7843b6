"""Carry a compression plan out on a model, and undo it: swap layers, keep ties, leave everything else alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_comera.compress.calibration import Calibration, InputStatistics, smoothed_counts
from hf_comera.compress.plan import CompressionPlan, LayerPlan
from hf_comera.modules import (
    CompressedLayer,
    FactorizedEmbedding,
    TiedEmbedding,
    TiedHead,
    TTLinear,
    TTMEmbedding,
    compressed_layers,
)
from hf_comera.tt.decomposition import relative_error
from hf_comera.tt.weighted import OutputSpectrum, weighted_error, weighted_tt

__all__ = [
    "build_layer",
    "decompose_layer",
    "decompose_model",
    "link_tied",
    "merge_model",
    "replace_layers",
    "shift_bias",
    "untie",
]


def build_layer(layer: LayerPlan, dense: Any, device: torch.device | str | None = None) -> CompressedLayer:
    """An uninitialised or freshly drawn compressed layer in place of ``dense``, with its dtype and training mode."""
    settings: dict[str, Any] = {
        "in_factors": layer.in_factors,
        "out_factors": layer.out_factors,
        "ranks": layer.ranks,
        "device": device,
        "dtype": dense.weight.dtype,
    }
    new: CompressedLayer
    if layer.width is not None:
        settings["padding_idx"] = dense.padding_idx
        new = FactorizedEmbedding(layer.in_size, layer.out_size, layer.width, **settings)
    elif layer.kind == "ttm_embedding":
        new = TTMEmbedding(layer.in_size, layer.out_size, padding_idx=dense.padding_idx, **settings)
    else:
        bias = getattr(dense, "bias", None)
        settings["transposed"] = isinstance(dense, Conv1D)
        new = TTLinear(layer.in_size, layer.out_size, bias=bias is not None, **settings)
    if layer.rank_gates:
        new.add_rank_gates()
    return new.train(dense.training)


def decompose_layer(
    layer: LayerPlan,
    dense: Any,
    weight: Tensor,
    token_counts: Tensor | None = None,
    calibration: Calibration | None = None,
) -> tuple[CompressedLayer, dict[str, float], Tensor | None]:
    """The decomposition of ``weight`` in a new layer, its errors, and what has to be added to the bias of ``dense``.

    With a calibration it is the best in the metric of the layer's outputs, else in the Frobenius norm. The bias of
    ``dense`` is carried over as the object it is. The new layer lives on the device of ``weight``.

    Returns:
        The layer; ``"error"``, the relative Frobenius error, and with a calibration ``"output_error"``, that of the
        outputs; the shift ``(out,)`` of the bias, which makes the mean of the outputs exact, or None.

    Raises:
        ValueError: If ``weight`` holds NaN or infinity, or nothing at all (meta device), or ``token_counts`` are not
            those of a factorized embedding, or the calibration has another layer of this name.
    """
    if weight.is_meta:
        raise ValueError(
            f"The weight of {layer.name!r} is on the meta device: there is nothing to decompose. Load the model first "
            "(AutoModel.from_pretrained), or build a new one: get_comera_model(AutoModel, comera_config, config=...)."
        )
    if not torch.isfinite(weight).all():
        raise ValueError(
            f"The weight of {layer.name!r} holds NaN or infinity and cannot be decomposed. "
            f"Repair the checkpoint, or add {layer.name!r} to exclude_modules."
        )
    new = build_layer(layer, dense, device="meta")
    errors: dict[str, float] = {}
    shift = None
    if isinstance(new, TTLinear):
        new.bias = dense.bias
        inputs = None if calibration is None else calibration.of_layer(layer.name, layer.in_size)
        if inputs is None:
            new.load_dense(weight)
        else:
            errors["output_error"], shift = _load_weighted(new, weight, inputs)
    elif isinstance(new, FactorizedEmbedding):
        if calibration is not None and token_counts is None:
            token_counts = smoothed_counts(calibration.counts_of(layer.name, layer.in_size))
        new.load_dense(weight, token_counts)
        if token_counts is not None:
            errors["output_error"] = _error_of_rows(new.dense(), weight, token_counts)
    else:
        new.load_dense(weight)
    for core in new.cores():
        core.requires_grad_(dense.weight.requires_grad)
    return new, {"error": relative_error(new.dense().detach(), weight), **errors}, shift


@torch.no_grad()
def _load_weighted(new: TTLinear, weight: Tensor, inputs: InputStatistics) -> tuple[float, Tensor | None]:
    """Cores of ``weight`` in the metric of ``inputs``; relative error of the outputs, and the shift of the bias."""
    matrix = (weight if new.transposed else weight.T).double()
    metric = inputs.metric(new.bias is not None).to(matrix)
    spectrum = OutputSpectrum(matrix, metric)
    new.load_cores(weighted_tt(spectrum, metric, new.in_factors, new.out_factors, new.ranks))
    found = (new.dense() if new.transposed else new.dense().T).double()
    shift = None if new.bias is None else inputs.mean.to(matrix) @ (matrix - found)
    return weighted_error(found, matrix, metric), shift


@torch.no_grad()
def _error_of_rows(found: Tensor, weight: Tensor, counts: Tensor) -> float:
    """Relative error of a table whose rows count by ``counts``."""
    roots = counts.to(weight.device).double().sqrt()[:, None]
    return relative_error(found.double() * roots, weight.double() * roots)


def shift_bias(layer: Any, shift: Tensor | None) -> None:
    """Add ``shift`` to the bias of ``layer``, in a new parameter: others may hold the old one."""
    if shift is not None:
        bias = layer.bias
        new = (bias.detach().double() + shift.to(bias.device)).to(bias.dtype)
        layer.bias = nn.Parameter(new, requires_grad=bias.requires_grad)


def decompose_model(
    model: nn.Module,
    plan: CompressionPlan,
    token_counts: Tensor | None = None,
    calibration: Calibration | None = None,
) -> dict[str, dict[str, float]]:
    """Replace the planned layers of a live model by their decompositions; returns the errors of each.

    All layers are decomposed before the first is replaced: an error leaves the model as it was.
    """
    new, errors = {}, {}
    for layer in tqdm(plan.layers, desc="decomposition", unit="layer", leave=False, delay=2.0):
        dense: Any = model.get_submodule(layer.name)
        made = decompose_layer(layer, dense, dense.weight.detach(), token_counts, calibration)
        new[layer.name], errors[layer.name], shift = made
        shift_bias(new[layer.name], shift)
    _swap(model, plan, new.__getitem__)
    return errors


def replace_layers(model: nn.Module, plan: CompressionPlan, device: torch.device | str | None = None) -> None:
    """Replace the planned layers by new ones without looking at their weights (for models on the meta device)."""
    layers = {layer.name: layer for layer in plan.layers}
    _swap(model, plan, lambda name: build_layer(layers[name], model.get_submodule(name), device))


def _swap(model: nn.Module, plan: CompressionPlan, new_layer: Callable[[str], CompressedLayer]) -> None:
    untie(model, plan.ties)
    for layer in plan.layers:
        model.set_submodule(layer.name, new_layer(layer.name))
    link_tied(model, plan.ties)


def link_tied(model: nn.Module, ties: dict[str, str]) -> None:
    """Put modules that compute with the cores of their source in place of tied heads and embeddings."""
    for name, source_name in ties.items():
        old, source = model.get_submodule(name), model.get_submodule(source_name)
        if isinstance(source, TTMEmbedding | FactorizedEmbedding):
            new = (
                TiedEmbedding(source)
                if isinstance(old, nn.Embedding)
                else TiedHead(source, getattr(old, "bias", None))
            )
            model.set_submodule(name, new.train(old.training))


def untie(model: nn.Module, ties: dict[str, str]) -> None:
    """Make Transformers forget the weight ties that the tied modules now keep by themselves.

    ``all_tied_weights_keys`` is what loading reads; ``_tied_weights_keys``, a class attribute, is what ``tie_weights``
    and ``save_pretrained`` expand again, so every model inside the model gets its own copy without those ties.
    """
    if not ties:
        return
    tied_keys = {f"{name}.weight" for name in ties}
    for name, part in model.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        prefix = f"{name}." if name else ""
        if part._tied_weights_keys:
            if "_tied_weights_keys" in part.__dict__:  # Marian's follow from its config
                part.__dict__["_dense_tied_weights_keys"] = part._tied_weights_keys
            part._tied_weights_keys = _without_ties(part, prefix, tied_keys)
        if hasattr(part, "all_tied_weights_keys"):
            kept = {k: v for k, v in part.all_tied_weights_keys.items() if prefix + k not in tied_keys}
            part.all_tied_weights_keys = kept


def _without_ties(part: PreTrainedModel, prefix: str, tied_keys: set[str]) -> dict[str, str]:
    """``_tied_weights_keys`` (names or patterns) of ``part``, expanded to names, without ``tied_keys``."""
    expanded = part.get_expanded_tied_weights_keys(all_submodels=False)
    return {target: source for target, source in expanded.items() if prefix + target not in tied_keys}


def merge_model(model: PreTrainedModel) -> None:
    """Turn every compressed layer back into the dense layer that it stands for, ties included."""
    layers = compressed_layers(model)
    tied = {name: m for name, m in model.named_modules() if isinstance(m, TiedHead | TiedEmbedding)}
    dense: dict[str, Any] = {name: _dense_layer(module) for name, module in layers.items()}
    by_source = {id(module): dense[name] for name, module in layers.items()}
    for name, tied_module in tied.items():
        dense[name] = _dense_tied(tied_module, by_source[id(tied_module.source)].weight)
    for name, new in dense.items():
        model.set_submodule(name, new.train(model.get_submodule(name).training))
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.__dict__.pop("_tied_weights_keys", None)
            if "_dense_tied_weights_keys" in part.__dict__:
                part._tied_weights_keys = part.__dict__.pop("_dense_tied_weights_keys")
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.all_tied_weights_keys = part.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights()


def _dense_layer(module: CompressedLayer) -> nn.Module:
    weight = nn.Parameter(module.dense().detach().contiguous(), requires_grad=module.cores()[0].requires_grad)
    if isinstance(module, TTMEmbedding | FactorizedEmbedding):
        return _with_weight(nn.Embedding, module.weight_shape(), weight, padding_idx=module.padding_idx)
    assert isinstance(module, TTLinear)
    if module.transposed:
        return _with_weight(Conv1D, (module.out_features, module.in_features), weight, bias=module.bias)
    return _with_weight(nn.Linear, (module.in_features, module.out_features), weight, bias=module.bias)


def _dense_tied(module: TiedHead | TiedEmbedding, weight: nn.Parameter) -> nn.Module:
    rows, columns = weight.shape
    if isinstance(module, TiedEmbedding):
        return _with_weight(nn.Embedding, (rows, columns), weight, padding_idx=module.padding_idx)
    return _with_weight(nn.Linear, (columns, rows), weight, bias=module.bias)


def _with_weight(kind: Any, sizes: tuple[int, int], weight: nn.Parameter, **attributes: Any) -> nn.Module:
    """A dense layer made without memory, then given ``weight`` and what else it owns."""
    with torch.device("meta"):
        new = kind(*sizes)
    for name, value in {"weight": weight, **attributes}.items():
        setattr(new, name, value)
    return new
