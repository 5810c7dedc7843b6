"""How the models of the quality benchmark are updated: AdamW or orthogonalised momentum, and the rate's course."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hf_comera import TTMuon, comera_param_groups, is_comera_model
from hf_comera.optim.tt_muon import COHERENCE

UPDATES = ("adamw", "muon")
WEIGHT_DECAY = 0.01
MOMENTUM = 0.9  # TTMuon's
MAX_WARMUP_STEPS = 200


def make_optimizers(
    update: str, model: nn.Module, compared: Sequence[nn.Parameter], *, lr: float, other_lr: float
) -> list[Optimizer]:
    """The optimizers of one run.

    Args:
        update: One of ``UPDATES``.
        model: In tensor-train form or dense.
        compared: The cores, or the dense weights that they replace.
        lr: Rate of ``compared``.
        other_lr: Rate of everything else.
    """
    if update == "adamw":
        return [torch.optim.AdamW(_split_groups(model, compared, lr=lr, other_lr=other_lr), lr=lr, fused=True)]
    if is_comera_model(model):
        return [_tensor_train_muon(model, lr=lr, other_lr=other_lr)]
    return _dense_muon(model, compared, lr=lr, other_lr=other_lr)


def rate_course(num_steps: int) -> Callable[[int], float]:
    """The share of the full rate at a step: a linear rise, then a linear fall to 0.

    >>> [round(rate_course(40)(step), 2) for step in (0, 1, 3, 4, 22, 39, 40)]
    [0.25, 0.5, 1.0, 1.0, 0.5, 0.03, 0.0]
    """
    warmup = min(MAX_WARMUP_STEPS, max(1, num_steps // 10))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (num_steps - step) / max(1, num_steps - warmup))

    return share


def _split_groups(
    model: nn.Module, compared: Sequence[nn.Parameter], *, lr: float, other_lr: float
) -> list[dict[str, object]]:
    """The library's groups, those that hold compared and other parameters in two."""
    wanted = set(map(id, compared))
    groups = []
    for group in comera_param_groups(model, lr, weight_decay=WEIGHT_DECAY):
        for rate, is_compared in ((group["lr"], True), (other_lr, False)):
            parameters = [parameter for parameter in group["params"] if (id(parameter) in wanted) is is_compared]
            if parameters:
                groups.append({"params": parameters, "lr": rate, "weight_decay": group["weight_decay"]})
    return groups


def _tensor_train_muon(model: nn.Module, *, lr: float, other_lr: float) -> Optimizer:
    optimizer = TTMuon(model, lr, weight_decay=WEIGHT_DECAY)
    for group in optimizer.param_groups:
        if group["group_name"] != "cores":
            group["lr"] = other_lr
    return optimizer


def _dense_muon(model: nn.Module, compared: Sequence[nn.Parameter], *, lr: float, other_lr: float) -> list[Optimizer]:
    """Torch's Muon for the matrices of linear layers, and AdamW for embeddings and the rest."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for weight in compared:
        if id(weight) not in tables:
            by_shape.setdefault(tuple(weight.shape), []).append(weight)
    groups = []
    for shape, weights in by_shape.items():
        rate = lr * muon_rate_scale(shape)
        # Muon decays by its rate times the decay: divided here, so that the decay is what AdamW's would be.
        groups.append({"params": weights, "lr": rate, "weight_decay": WEIGHT_DECAY * lr / rate})
    matrices = [weight for weights in by_shape.values() for weight in weights]
    others = [
        group
        for group in _split_groups(model, matrices, lr=lr, other_lr=other_lr)
        if not set(map(id, group["params"])) & set(map(id, matrices))
    ]
    muon = torch.optim.Muon(groups, lr=lr, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=other_lr, fused=True)]


def muon_rate_scale(shape: Sequence[int]) -> float:
    """Muon's rate over ``lr``, for steps of spectral norm ``lr * COHERENCE * sqrt(rows * columns)``.

    With ``match_rms_adamw`` a step of Muon has the norm ``rate * 0.2 * sqrt(max(rows, columns))``.

    >>> muon_rate_scale((64, 256)) == muon_rate_scale((256, 64)) == 16.0
    True
    """
    return COHERENCE / 0.2 * math.sqrt(min(shape))
