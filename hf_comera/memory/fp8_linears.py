"""``set_fp8_linears``: let the dense linear layers of a model multiply in FP8."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_comera.ops.fp8_linear import FEATURE_MULTIPLE, fp8_device_refusal, fp8_linear

__all__ = ["Fp8LinearsReport", "set_fp8_linears"]


LOGGER = logging.getLogger(__name__)


class _Fp8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias)


class _Fp8Conv1D(Conv1D):
    """GPT-2's linear layer, whose weight is transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight.T, self.bias)


_FP8_CLASSES: dict[type, type] = {nn.Linear: _Fp8Linear, Conv1D: _Fp8Conv1D}
_ORDINARY_CLASSES = {fp8: ordinary for ordinary, fp8 in _FP8_CLASSES.items()}


@dataclass(frozen=True)
class Fp8LinearsReport:
    """Which layers multiply in FP8, and why the others do not."""

    in_fp8: list[str]
    left_out: dict[str, str]

    def __str__(self) -> str:
        """One line, and one for each reason."""
        counts: dict[str, int] = {}
        for reason in self.left_out.values():
            counts[reason] = counts.get(reason, 0) + 1
        lines = [f"{len(self.in_fp8)} linear layers multiply in FP8"]
        return "\n".join(lines + [f"{count} do not: {reason}" for reason, count in counts.items()])


def set_fp8_linears(model: nn.Module, min_features: int | None = 2048) -> Fp8LinearsReport:
    """Let dense linear layers multiply in FP8, forward and backward, in training and in evaluation.

    Parameters, hooks, adapters and names in checkpoints stay what they are. A layer keeps its input for backward in
    FP8, once for all layers that share it, whatever the activation policy says. Never changed are tensor-train layers,
    whose products are thin, the layer that gives the logits, and classes that models derive from linear layers.
    Second derivatives and transforms of ``torch.func`` are not to be had.

    Args:
        model: Any module.
        min_features: Smallest number of in and out features of a layer that is worth it; None takes all layers back
            to ordinary products. FP8 pays for large layers only. 2048 is the smallest size with a published
            time (1.47x as fast, COAT's table 6); none of ours was measured.

    Returns:
        The changed layers, and the others with reasons; if none was changed, the log says so too.

    Raises:
        TypeError: If ``model`` is no module.
        ValueError: If ``min_features`` is not positive, the device cannot multiply in FP8, or the forward of a layer
            was replaced since it does. Nothing is changed then.

    Source:
        COAT, arXiv:2410.19313, section 5 and table 6.
    """
    _check(model, min_features)
    for module in model.modules():
        module.__class__ = _ORDINARY_CLASSES.get(type(module), type(module))
    report = Fp8LinearsReport([], {})
    if min_features is None:
        return report
    heads = [find() for module in model.modules() if (find := getattr(module, "get_output_embeddings", None))]
    linears: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if type(module) in _FP8_CLASSES
    ]
    for name, module in linears:
        is_head = any(module is head for head in heads)
        reason = "it gives the logits" if is_head else _refusal(module, min_features)
        if reason is None:
            module.__class__ = _FP8_CLASSES[type(module)]
            report.in_fp8.append(name)
        else:
            report.left_out[name] = reason
    if not report.in_fp8:
        LOGGER.warning("set_fp8_linears(min_features=%d) changes nothing: %s", min_features, report)
    return report


def _refusal(module: nn.Linear | Conv1D, min_features: int) -> str | None:
    weight = module.weight
    if "forward" in module.__dict__:
        return "their forward was replaced, as Accelerate does to offload layers"
    if min(weight.shape) < min_features:
        return f"fewer than {min_features} features on one side"
    if any(size % FEATURE_MULTIPLE for size in weight.shape):
        return f"sizes are not multiples of {FEATURE_MULTIPLE}"
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"weights are {weight.dtype}"
    return None


def _check(model: nn.Module, min_features: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"set_fp8_linears needs a model, a torch.nn.Module, and got {type(model).__name__}.")
    for name, module in model.named_modules():
        if type(module) in _ORDINARY_CLASSES and "forward" in module.__dict__:
            raise ValueError(
                f"set_fp8_linears: the forward of {name} was replaced since it multiplies in FP8. Take that back "
                "first, for example with accelerate.hooks.remove_hook_from_module."
            )
    if min_features is None:
        return
    if isinstance(min_features, bool) or not isinstance(min_features, int) or min_features < 1:
        raise ValueError(f"min_features={min_features!r} must be a positive integer, such as 2048, or None.")
    for device in {parameter.device for parameter in model.parameters()}:
        if reason := fp8_device_refusal(device):
            raise ValueError(f"set_fp8_linears: {reason}. set_activation_policy(model, 'fp8') works there.")
