"""``TTMuon``: orthogonalised momentum for the cores of tensor trains, AdamW for everything else."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hf_comera.modules import TTLinear
from hf_comera.optim.orthogonalize import orthogonalize
from hf_comera.optim.param_groups import check_rate_and_decay, other_param_groups, tensor_train_modules
from hf_comera.tt.tangent import interface_factors, remove_gauge, to_core, to_orthogonal_gauge

__all__ = ["COHERENCE", "TTMuon"]

COHERENCE = 0.55
"""Spectral norm of AdamW's first updates of a dense matrix, over the most it can be, ``lr * sqrt(rows * columns)``.

Seen on linear layers of a small GPT-2 and a small RoBERTa: 0.5 to 0.9 in the first two steps. It then falls to 0.1 to
0.2, as gradients agree less; the steps here fall with their certainty to about the same.
"""

SUMS = frozenset({"square_norm", "weight"})
"""State of a core that stays float32: weighted sums over the steps of its gradients' squared norms, and of ones."""


class _Train(NamedTuple):
    """The cores of one layer; the first ``num_left`` have their middle bond on the right."""

    cores: list[nn.Parameter]
    num_left: int

    def key(self) -> tuple[Any, ...]:
        """Equal for trains that can be stepped together."""
        has_gradient = tuple(core.grad is not None for core in self.cores)
        shapes = tuple(core.shape for core in self.cores)
        return shapes, has_gradient, self.num_left, self.cores[0].dtype, self.cores[0].device


class TTMuon(torch.optim.Optimizer):
    """Steps that move the implied matrices of a compressed model as far as AdamW moves dense ones at the same rate.

    For every core, the momentum of its gradient is moved into the orthogonal gauge (where a step on the core is an
    equal step on the matrix), freed of what a neighbour does as well, and orthogonalised; so every direction that the
    core can give the matrix gets an equal step. Of m cores that move, each moves the implied matrix by
    ``certainty * lr * COHERENCE * sqrt(rows * columns / m)`` in spectral norm, to the accuracy of the iteration (0.7
    to 1.2), whatever the ranks and the scale between the cores; their steps are orthogonal to each other, so norms add
    up as squares. The certainty of a core is the norm of its momentum over the root of the equally weighted mean of
    its gradients' squared norms: 1 where all agree, 0.23 where they are noise (at momentum 0.9). AdamW's steps shrink
    in the same way. Weight decay shrinks the implied matrix by ``1 - lr * weight_decay``. Parameters that are no cores
    are trained by ``torch``'s AdamW.

    The result does not depend on how the gradients are scaled.

    Args:
        model: The model to train; layers in tensor-train form are found in it. Frozen parameters are left out.
        lr: Learning rate, as for AdamW on the dense model.
        weight_decay: Decoupled weight decay of (implied) matrices; biases and norms have none.
        momentum: Of the cores' gradients, in Nesterov's form.
        betas: AdamW's, for the parameters that are no cores.
        eps: AdamW's.

    Raises:
        ValueError: If a setting is out of range or nothing is trainable.

    Source:
        Orthogonalised momentum: Jordan et al., "Muon", 2024. Bound by the other factors' norms: Spectron,
        arXiv:2602.12429, for two factors. The orthogonal gauge for all cores at once is ours.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.01,
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        check_rate_and_decay(lr, weight_decay)
        for name, value in (("momentum", momentum), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be at least 0 and less than 1, for example 0.9.")
        groups = _train_groups(model, lr, weight_decay) + other_param_groups(model, lr, weight_decay)
        if not groups:
            raise ValueError("No parameter of the model requires a gradient. Unfreeze what is to be trained.")
        super().__init__(groups, {"momentum": momentum, "betas": betas, "eps": eps, "trains": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: Evaluates the model and returns the loss, as for other optimizers; optional.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["trains"] is None:
                self._step_others(group)
            else:
                self._step_trains(group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, exactly."""
        super().load_state_dict(state_dict)
        # torch gives all state the dtype of its parameter, which would round the sums of a bfloat16 core
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            for key in SUMS & saved.keys():
                self.state[parameters[index]][key] = saved[key].to(parameters[index].device, copy=True)

    def _step_trains(self, group: dict[str, Any]) -> None:
        families: dict[tuple[Any, ...], list[_Train]] = {}
        cores = iter(group["params"])
        for num_cores, num_left in group["trains"]:
            train = _Train([next(cores) for _ in range(num_cores)], num_left)
            if any(core.grad is not None for core in train.cores):
                families.setdefault(train.key(), []).append(train)
        for trains in families.values():
            self._step_family(trains, group)

    def _step_family(self, trains: list[_Train], group: dict[str, Any]) -> None:
        """Step trains of equal shapes together."""
        places = [place for place, core in enumerate(trains[0].cores) if core.grad is not None]
        stacked = [_stack([train.cores[place] for train in trains]) for place in range(len(trains[0].cores))]
        momenta = {place: self._momentum([train.cores[place] for train in trains], group) for place in places}
        steps = _orthogonal_steps(stacked, momenta, trains[0].num_left)
        rows, columns = _matrix_shape(trains[0])
        bound = group["lr"] * COHERENCE * math.sqrt(rows * columns)
        kept = 1 - group["lr"] * group["weight_decay"] / len(stacked)
        for place in places:
            cores = [train.cores[place] for train in trains]
            torch._foreach_mul_(cores, kept)
            if place in steps:
                step = steps[place] * self._certainty(trains, place)
                parts = [part.view_as(core).to(core.dtype) for part, core in zip(step, cores, strict=True)]
                torch._foreach_add_(cores, parts, alpha=-bound)

    def _momentum(self, cores: list[nn.Parameter], group: dict[str, Any]) -> Tensor:
        """Advance the momentum of ``cores`` and look ahead along it; one stacked tensor."""
        for core in cores:
            if core not in self.state:
                none = torch.zeros((), dtype=torch.float32, device=core.device)
                self.state[core] = {
                    "momentum_buffer": torch.zeros_like(core, memory_format=torch.preserve_format),
                    "square_norm": none,
                    "weight": none.clone(),
                }
        states, gradients = [self.state[core] for core in cores], [core.grad for core in cores]
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        squares = [norm.float().square() for norm in torch._foreach_norm(gradients)]
        torch._foreach_lerp_([state["square_norm"] for state in states], squares, 1 - group["momentum"])
        ones = [torch.ones_like(square) for square in squares]
        torch._foreach_lerp_([state["weight"] for state in states], ones, 1 - group["momentum"])
        return torch.lerp(_stack(gradients), _stack(buffers), group["momentum"])

    def _certainty(self, trains: list[_Train], place: int) -> Tensor:
        """How far the last gradients of a core agree, of every train: ``(trains, 1, 1, 1)`` in (0, 1].

        Norm of the mean over root of the mean square norm; both are sums whose weights add up to ``weight``.
        """
        states = [self.state[train.cores[place]] for train in trains]
        mean = torch.stack(torch._foreach_norm([state["momentum_buffer"] for state in states])).float()
        squares, weights = (torch.stack([state[key] for state in states]) for key in ("square_norm", "weight"))
        tiny = torch.finfo(squares.dtype).tiny
        return (mean / (squares * weights).sqrt().clamp_min(tiny)).view(-1, 1, 1, 1)

    def _step_others(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=all(parameter.device.type in ("cpu", "cuda") for parameter in parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _train_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """One group with the cores of all layers that train, and how they are cut into trains."""
    layers = {
        name: module
        for name, module in tensor_train_modules(model).items()
        if any(core.requires_grad for core in module.cores())
    }
    if not layers:
        return []
    group: dict[str, Any] = {"params": [], "names": [], "trains": [], "group_name": "cores"}
    for name, layer in layers.items():
        group["params"] += layer.cores()
        group["names"] += [f"{name}.core_{place}".removeprefix(".") for place in range(layer.num_cores)]
        num_left = len(layer.in_factors) if isinstance(layer, TTLinear) else layer.num_cores // 2
        group["trains"].append((layer.num_cores, num_left))
    return [{**group, "lr": lr, "weight_decay": weight_decay}]


def _orthogonal_steps(cores: list[Tensor], momenta: dict[int, Tensor], num_left: int) -> dict[int, Tensor]:
    """Steps of all cores that together move the implied matrix by about one in spectral norm.

    Shape:
        cores and momenta ``(trains, r_{k-1}, n_k, r_k)`` -> the same; cores that only mix ranks have no step.
    """
    left, right = interface_factors(cores)
    moving = [place for place in momenta if not _only_mixes_ranks(cores[place], place, num_left, len(cores))]
    steps = {}
    for place in moving:
        before, behind = left[place], right[place + 1]
        step = to_orthogonal_gauge(momenta[place], before, behind)
        on_left = place < num_left
        if on_left and place != num_left - 1:
            step = remove_gauge(step, cores[place], before, left[place + 1], on_left=True)
        elif not on_left and place != num_left:
            step = remove_gauge(step, cores[place], behind, right[place], on_left=False)
        unfolding = step.flatten(-3, -2) if on_left else step.flatten(-2)
        steps[place] = to_core(orthogonalize(unfolding).view_as(step), before, behind) / math.sqrt(len(moving))
    return steps


def _only_mixes_ranks(core: Tensor, place: int, num_left: int, num_cores: int) -> bool:
    """Whether the neighbour towards the middle can do all that this core can: its unfolding is square."""
    *_, rank_before, factor, rank_behind = core.shape
    if place in (num_left - 1, num_left):
        return False
    return rank_before * factor <= rank_behind if place < num_left else factor * rank_behind <= rank_before


def _three_axes(core: Tensor) -> Tensor:
    """A TTM core with its row and column factor as one."""
    return core.flatten(1, -2)


def _stack(cores: list[Any]) -> Tensor:
    """``(trains, left rank, factor, right rank)`` in float32 or float64."""
    stacked = torch.stack([_three_axes(core) for core in cores])
    return stacked if stacked.dtype == torch.float64 else stacked.float()


def _matrix_shape(train: _Train) -> tuple[int, int]:
    """Rows and columns of the implied matrix, padding included."""
    first = train.cores[0]
    if first.ndim == 4:  # a TTM core carries a factor of both
        return math.prod(core.shape[1] for core in train.cores), math.prod(core.shape[2] for core in train.cores)
    factors = [core.shape[1] for core in train.cores]
    return math.prod(factors[: train.num_left]), math.prod(factors[train.num_left :])
