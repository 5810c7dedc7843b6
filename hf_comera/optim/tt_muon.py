"""``TTMuon``: orthogonalised momentum for the cores of tensor trains, AdamW for everything else."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hf_comera.modules import TTLinear
from hf_comera.ops.float32_products import exact_float32_products
from hf_comera.optim.families import Family, Train, families
from hf_comera.optim.moved_state import check_saved_shapes, follow
from hf_comera.optim.orthogonal_steps import orthogonal_steps
from hf_comera.optim.param_groups import (
    check_not_negative,
    check_rate_and_decay,
    check_whole,
    other_param_groups,
    tensor_train_modules,
)
from hf_comera.tt.norms import finite_norms

__all__ = ["COHERENCE", "TTMuon"]

COHERENCE = 0.55
"""Spectral norm of AdamW's first updates of a dense matrix, over the most it can be, ``lr * sqrt(rows * columns)``.

Seen on linear layers of a small GPT-2 and a small RoBERTa: 0.5 to 0.9 in the first two steps. It then falls to 0.1 to
0.2, as gradients agree less; the steps here fall with their certainty to about the same.
"""

HUGE = 2.0**30
"""Norm of a momentum from which on it is scaled down to this, as squares and products are made of it.

Its scale does not matter to the step; below, where gradients normally are, nothing is changed.
"""


class TTMuonState(dict[str, Any]):
    """The state of a :class:`TTMuon` in a checkpoint, which other optimizers refuse with a sentence that helps.

    Torch copies a state before it looks into it, and would tell the numbers of parameter groups only.
    """

    def copy(self) -> dict[str, Any]:
        """Asked for by other optimizers alone.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "The checkpoint has the state of TTMuon, the optimizer of ComeraTrainer, and another optimizer was to "
            "load it, say that of a plain Trainer. Resume with ComeraTrainer, or load the weights by from_pretrained "
            "and start anew."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Made of a plain dict, which torch's reader fills where it runs no code."""
        return type(self), (dict(self),)


torch.serialization.add_safe_globals([TTMuonState])  # so that it is read with weights_only=True


class TTMuon(torch.optim.Optimizer):
    """Steps that move the implied matrices of a compressed model as far as AdamW moves dense ones at the same rate.

    For every core, the momentum of its gradient is moved into the orthogonal gauge (where a step on the core is an
    equal step on the matrix), freed of what a neighbour does as well, and orthogonalised; so every direction that the
    core can give the matrix gets an equal step. Of m cores that move, each has a step of spectral norm
    ``certainty * lr * COHERENCE * sqrt(rows * columns / m)`` in that gauge at its own bond, to the accuracy of the
    iteration (0.7 to 1.2); the steps of different cores are orthogonal, and at full rank there is one, that of the
    dense matrix. The certainty of a core is the norm of the mean of its last gradients over the mean of their norms:
    1 where all agree, 0.23 where they are noise (at momentum 0.9). AdamW's steps shrink in the same way.

    Neither the scale of the gradients nor, up to damping, scale and basis between the cores matter to the steps of
    cores. Weight decay shrinks the implied matrix by ``1 - lr * weight_decay``. Parameters that are no cores are
    trained by ``torch``'s AdamW. Rank gates are left out of the gauge: as they scale a rank, they scale its steps.

    A step waits for nothing on the device. With the ``lr`` of each group in a scalar tensor there, best of float64, as
    :class:`hf_comera.GraphedStep` puts it, steps can be part of a CUDA graph and still follow a schedule.

    Args:
        model: The model to train; layers in tensor-train form are found in it. Freeze before making the optimizer:
            layers without a trainable core are left out. Cores must be whole, as under DDP, not sharded.
        lr: Learning rate, as for AdamW on the dense model.
        weight_decay: Decoupled weight decay of (implied) matrices; biases and norms have none.
        momentum: Of the cores' gradients, in Nesterov's form.
        betas: AdamW's, for the parameters that are no cores.
        eps: AdamW's.
        gate_lr: Learning rate of rank gates, where there are any; default ``lr``.

    Raises:
        ValueError: If a setting is out of range, nothing is trainable, or a core is sharded or belongs to two layers.

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
        gate_lr: float | None = None,
    ) -> None:
        check_rate_and_decay(lr, weight_decay, gate_lr)
        check_not_negative("eps", eps, 1e-8)
        for name, value in (("momentum", momentum), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be at least 0 and less than 1, for example 0.9.")
        groups = _train_groups(model, lr, weight_decay) + other_param_groups(model, lr, weight_decay, gate_lr)
        if not groups:
            raise ValueError("No parameter of the model requires a gradient. Unfreeze what is to be trained.")
        # fused: where torch looks for the device that AdamW's step counts belong on when it loads a state
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(groups, {**defaults, "fused": True, "trains": None})
        self._families: dict[Any, list[tuple[list[int], Family]]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters, which are trained by AdamW, with settings of their own."""
        for name, example in (("lr", 0.001), ("weight_decay", 0.01)):
            if not isinstance(value := param_group.get(name, 0.0), Tensor):
                check_not_negative(name, value, example)
        super().add_param_group(param_group)

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
        # the first group is empty once all layers are removed
        devices = [group["params"][0].device.type for group in self.param_groups if group["params"]]
        with _exact_products(devices[0] if devices else "cpu"):
            for group in self.param_groups:
                if group["trains"] is None:
                    self._step_others(group)
                else:
                    self._step_trains(group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as it was saved.

        Raises:
            ValueError: If it is that of another optimizer, or of other ranks or shapes; nothing is changed then.
        """
        if not all("trains" in group for group in state_dict["param_groups"]):
            raise ValueError(
                "The state is not one of TTMuon: its groups do not say which cores belong together. Load a state that "
                "TTMuon saved, or train on with the optimizer that saved this one."
            )
        check = self.register_load_state_dict_pre_hook(
            lambda _, loaded: check_saved_shapes(self, loaded, ("momentum_buffer", "exp_avg", "exp_avg_sq"))
        )  # the last of the hooks: one before it may drop removed layers
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            check.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also on loading a state and copying: families are made again when they are needed."""
        super().__setstate__(state)
        self._families = {}

    def _step_trains(self, group: dict[str, Any]) -> None:
        gathered: dict[tuple[Any, ...], list[Train]] = {}
        cores = iter(group["params"])
        for num_cores, num_left, entries in group["trains"]:
            train = Train([next(cores) for _ in range(num_cores)], num_left, entries)
            if any(core.grad is not None for core in train.cores):
                gathered.setdefault(train.key(), []).append(train)
        found = {}
        for key, trains in gathered.items():
            shapes = tuple(train.shapes() for train in trains)
            found[key, shapes] = self._families.get((key, shapes)) or families(trains)
            for members, family in found[key, shapes]:
                self._step_family(family, [trains[index] for index in members], group)
        self._families = found  # without those of ranks that have been cut since

    def _step_family(self, family: Family, trains: list[Train], group: dict[str, Any]) -> None:
        """Step trains of equal factors together."""
        cores = [[train.cores[place] for train in trains] for place in range(len(trains[0].cores))]
        momenta, certainty = self._momenta([cores[place] for place in family.places], family, group)
        steps = orthogonal_steps(family, _exact(family.all_cores.pack(cores)), momenta)
        moving = [cores[place] for place in family.moving]
        bound = group["lr"] * COHERENCE * math.sqrt(trains[0].entries)
        sizes = torch.stack([certainty[place] for place in family.moving]) * family.part * -bound
        parts = family.moving_cores.unpack([step * size for step, size in zip(steps, sizes, strict=True)])
        kept = 1 - group["lr"] * group["weight_decay"] / len(family.places)
        decayed = [core for place in family.places for core in cores[place]]
        torch._foreach_mul_(decayed, kept.to(decayed[0].dtype) if isinstance(kept, Tensor) else kept)
        stepped = [core for of_place in moving for core in of_place]
        parts = [part.view_as(core).to(core.dtype) for part, core in zip(parts, stepped, strict=True)]
        torch._foreach_add_(stepped, parts)

    def _momenta(
        self, places: list[list[nn.Parameter]], family: Family, group: dict[str, Any]
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Advance the momenta of cores and look ahead along them; stacked, one for each place, and how sure they are.

        The certainty of a place, ``(trains, 1, 1, 1)`` from 0 to 1, is how far the last gradients of its cores agree:
        the norm of their mean over the mean of their norms; both began at zero, so they are too small alike.
        """
        cores = [core for of_place in places for core in of_place]
        for core in cores:
            if core not in self.state:
                buffer = torch.zeros_like(core, memory_format=torch.preserve_format)
                self.state[core] = {"momentum_buffer": buffer, "mean_norm": core.new_zeros(())}
            follow(core, self.state[core], "momentum_buffer")
        states, gradients = [self.state[core] for core in cores], [core.grad for core in cores]
        buffers, means = ([state[key] for state in states] for key in ("momentum_buffer", "mean_norm"))
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        stacks = family.cores_with_gradient
        joined = _exact([stacks.join([gradients]), stacks.join([buffers])])
        of_gradients, of_buffers = (finite_norms(stacks.cut(each)) for each in joined)
        largest = torch.finfo(means[0].dtype).max
        norms = of_gradients.clamp_max(largest).to(means[0].dtype).unbind()
        torch._foreach_lerp_(means, norms, 1 - group["momentum"])
        mean_norms = torch.stack(means).to(of_buffers.dtype)
        certainty = (of_buffers / mean_norms.clamp_min(torch.finfo(mean_norms.dtype).tiny)).clamp_max(1.0)
        scales = (torch.maximum(of_gradients, of_buffers) / HUGE).clamp_min(1.0)
        certainties, scales = (each.view(len(places), -1, 1, 1, 1) for each in (certainty, scales))
        momenta = stacks.spread(torch.lerp(*joined, group["momentum"]))
        scaled = [momentum / scale for momentum, scale in zip(momenta, scales, strict=True)]
        return scaled, dict(zip(family.places, certainties, strict=True))

    def _step_others(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            follow(parameter, state, "exp_avg")
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
            lr=group["lr"].float() if isinstance(group["lr"], Tensor) and group["lr"].is_cuda else group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _train_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """One group with the cores of all layers that train, and how they are cut into trains."""
    layers = {
        name: module
        for name, module in tensor_train_modules(model).items()
        if any(core.requires_grad for core in module.cores()) and not module.is_removed
    }
    if not layers:
        return []
    check_whole(layers)
    group: dict[str, Any] = {"params": [], "names": [], "trains": [], "group_name": "cores"}
    for name, layer in layers.items():
        group["params"] += layer.cores()
        group["names"] += [f"{name}.core_{place}".removeprefix(".") for place in range(layer.num_cores)]
        num_left = len(layer.in_factors) if isinstance(layer, TTLinear) else layer.num_cores // 2
        group["trains"].append((layer.num_cores, num_left, math.prod(layer.weight_shape())))
    return [{**group, "lr": lr, "weight_decay": weight_decay}]


@contextmanager
def _exact_products(device_type: str) -> Iterator[None]:
    """Float32 products as such: Gram matrices square the condition, and TF32 or autocast would show in the steps."""
    with exact_float32_products(), torch.autocast(device_type, enabled=False):
        yield


def _exact(tensors: list[Tensor]) -> list[Tensor]:
    """In float64 where they are, else in float32."""
    return [tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors]
