"""``TTMuon``: orthogonalised momentum for the cores of tensor trains, AdamW for everything else."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hf_comera.modules import TTLinear
from hf_comera.ops.precision import exact_float32_products
from hf_comera.optim.moved_state import check_saved_shapes, follow
from hf_comera.optim.param_groups import (
    check_not_negative,
    check_rate_and_decay,
    check_whole,
    other_param_groups,
    tensor_train_modules,
)
from hf_comera.tt.cores import finite_norms
from hf_comera.tt.gauge import interface_factors, remove_gauge, to_core, to_orthogonal_gauge
from hf_comera.tt.padding import RaggedStacks

__all__ = ["COHERENCE", "ShapeGroup", "TTCores", "TTMuon", "orthogonal_steps", "orthogonalize", "shape_groups"]

# Quintic a x + b x^3 + c x^5 whose iteration moves singular values from (0.002, 1] to about [0.7, 1.2] in five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """All singular values of ``matrix`` set to about one (0.7 to 1.2); those below 1/500 of the norm stay smaller.

    The iterates are ``matrix`` times a polynomial of its Gram matrix, so only the smaller Gram matrix is iterated: two
    products with the long side instead of three a step.

    Args:
        matrix: ``(..., rows, columns)``, float32 or float64; zero gives zero.

    Source:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (coefficients).
    """
    if matrix.shape[-2] < matrix.shape[-1]:
        return orthogonalize(matrix.mT).mT
    a, b, c = COEFFICIENTS
    scaled = matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny ** 0.5)
    scaled = scaled.reshape(-1, *matrix.shape[-2:])
    gram = total = scaled.mT @ scaled
    for step in range(STEPS):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        total = polynomial if step == 0 else torch.bmm(total, polynomial)
        if step + 1 < STEPS:
            gram = torch.bmm(torch.bmm(polynomial, gram), polynomial)
    return torch.bmm(scaled, total).view(matrix.shape)


WORTH_A_FAMILY = 2**16
"""Entries of padding that have to be saved for tensor trains to be stepped apart.

Padding costs arithmetic, a group of its own costs launches. On a CPU both are about even here (benchmarks/NOTES.md).
"""

Shape = tuple[int, int, int]
"""Of a core: left rank, factor, right rank."""


class TTCores(NamedTuple):
    """The cores of one layer; the first ``num_left`` have the middle bond on their right."""

    cores: list[nn.Parameter]
    num_left: int
    entries: int
    """Of the implied matrix."""

    def shapes(self) -> tuple[Shape, ...]:
        """Those of the cores, the row and column factor of a TTM core as one."""
        return tuple((core.shape[0], core.shape[1:-1].numel(), core.shape[-1]) for core in self.cores)

    def key(self) -> tuple[Any, ...]:
        """Equal for trains that can be stepped together."""
        factors = tuple(core.shape[1:-1] for core in self.cores)
        has_gradient = tuple(core.grad is not None for core in self.cores)
        return factors, has_gradient, self.num_left, self.entries, self.cores[0].dtype, self.cores[0].device


class ShapeGroup:
    """Decisions about steps that follow from the shapes of tensor trains with equal keys; valid while the shapes stay.

    A decision that is the same for all trains is a plain bool, one that is not a mask ``(trains, 1, 1, 1)``.

    Args:
        tensor_trains: With equal keys. They are not kept.
    """

    places: list[int]
    """Of the cores with a gradient."""
    moving: list[int]
    """Of those that have a step in any train."""
    shared: dict[int, bool | Tensor]
    """For each place with a gradient: whether the neighbour towards the centre is asked first."""
    still: dict[int, bool | Tensor]
    """For each place with a gradient: whether that neighbour leaves nothing to it."""
    part: Tensor
    """The share of each of m moving cores in the step of the matrix, ``1 / sqrt(m)``: ``(trains, 1, 1, 1)``."""
    live: list[Tensor | None]
    """For each bond, outer ones too, which ranks are no padding: ``(trains, largest rank)``; None for all."""

    def __init__(self, tensor_trains: Sequence[TTCores]) -> None:
        first, shapes = tensor_trains[0], [tensor_train.shapes() for tensor_train in tensor_trains]
        self.num_left, self._device = first.num_left, first.cores[0].device
        self.places = [place for place, core in enumerate(first.cores) if core.grad is not None]
        shared = {place: [self._is_shared(tensor_train, place) for tensor_train in shapes] for place in self.places}
        still = {
            place: [
                is_shared and only_mixes_ranks(tensor_train[place], place < self.num_left)
                for is_shared, tensor_train in zip(shared[place], shapes, strict=True)
            ]
            for place in self.places
        }
        self.shared = {place: self._decision(values) for place, values in shared.items()}
        self.still = {place: self._decision(values) for place, values in still.items()}
        self.moving = [place for place in self.places if not all(still[place])]
        numbers = [values.count(False) for values in zip(*still.values(), strict=True)]
        exact = torch.promote_types(first.cores[0].dtype, torch.float32)
        self.part = self._tensor([1 / math.sqrt(number) for number in numbers], exact).view(-1, 1, 1, 1)
        ranks = [[1] * len(tensor_trains), *([shape[2] for shape in cores] for cores in zip(*shapes, strict=True))]
        self.live = [self._live(of_bond) for of_bond in ranks]
        selections = (tuple(range(len(first.cores))), tuple(self.places), tuple(self.moving))
        stacks = {places: self._stacks(shapes, places) for places in dict.fromkeys(selections)}
        self.all_cores, self.cores_with_gradient, self.moving_cores = (stacks[places] for places in selections)

    def _is_shared(self, shapes: Sequence[Shape], place: int) -> bool:
        centre = self.num_left - 1 if left_is_larger(shapes, self.num_left) else self.num_left
        inner = place + 1 if place < self.num_left else place - 1
        return place != centre and inner in self.places

    def _decision(self, values: list[bool]) -> bool | Tensor:
        return values[0] if len(set(values)) == 1 else self._tensor(values).view(-1, 1, 1, 1)

    def _live(self, ranks: list[int]) -> Tensor | None:
        return None if len(set(ranks)) == 1 else self._tensor([[j < r for j in range(max(ranks))] for r in ranks])

    def _tensor(self, values: list[Any], dtype: torch.dtype = torch.bool) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu").to(self._device)

    def _stacks(self, shapes: Sequence[tuple[Shape, ...]], places: Sequence[int]) -> RaggedStacks:
        return RaggedStacks([[tensor_train[place] for tensor_train in shapes] for place in places], self._device)


def shape_groups(tensor_trains: Sequence[TTCores]) -> list[tuple[list[int], ShapeGroup]]:
    """Which of some trains with equal keys are stepped together: their indices, and the family that they are."""
    shapes = [tensor_train.shapes() for tensor_train in tensor_trains]
    by_size = sorted(range(len(tensor_trains)), key=lambda index: sum(map(math.prod, shapes[index])))
    return [(members, ShapeGroup([tensor_trains[index] for index in members])) for members in _parted(by_size, shapes)]


def _parted(members: list[int], shapes: Sequence[tuple[Shape, ...]]) -> list[list[int]]:
    """Small trains apart from large ones, wherever that is worth it."""

    def cost(part: list[int]) -> int:
        places = zip(*(shapes[index] for index in part), strict=True)
        largest = ([max(sizes) for sizes in zip(*of_place, strict=True)] for of_place in places)
        return len(part) * sum(map(math.prod, largest))

    costs = {cut: cost(members[:cut]) + cost(members[cut:]) for cut in range(1, len(members))}
    best = min(costs, key=costs.__getitem__, default=0)
    if not best or cost(members) - costs[best] <= WORTH_A_FAMILY:
        return [sorted(members)]
    return _parted(members[:best], shapes) + _parted(members[best:], shapes)


def left_is_larger(shapes: Sequence[Shape], num_left: int) -> bool:
    """Of the two cores at the middle bond; at full rank the larger one can do all that the other can."""
    if 0 < num_left < len(shapes):
        return math.prod(shapes[num_left - 1]) > math.prod(shapes[num_left])
    return num_left > 0


def only_mixes_ranks(shape: Shape, on_left: bool) -> bool:
    """Whether the neighbour towards the centre can do all that this core can: its unfolding is square."""
    rank_before, factor, rank_behind = shape
    return rank_before * factor <= rank_behind if on_left else factor * rank_behind <= rank_before


def orthogonal_steps(shape_group: ShapeGroup, cores: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
    """Steps of the cores that move, each of about one in the orthogonal gauge; not yet divided among them.

    Directions that a neighbour towards the centre shares are left to that neighbour, if it has a gradient.

    Args:
        shape_group: What the shapes decide.
        cores: All cores, stacked and padded.
        momenta: Of the places with a gradient.

    Shape:
        ``(trains, r_{k-1}, n_k, r_k)`` -> the same for each moving place; padding is zero.
    """
    befores, behinds = interface_factors(cores, shape_group.live)
    momentum_of = dict(zip(shape_group.places, momenta, strict=True))
    steps = []
    for place in shape_group.moving:
        on_left = place < shape_group.num_left
        before, behind = befores[place], behinds[place]
        step = to_orthogonal_gauge(momentum_of[place], before, behind)
        shared, still = shape_group.shared[place], shape_group.still[place]
        if shared is not False:
            outer, live = (before, shape_group.live[place + 1]) if on_left else (behind, shape_group.live[place])
            freed = remove_gauge(step, cores[place], outer, on_left=on_left, live=live)
            step = freed if shared is True else torch.where(shared, freed, step)
        unfolding = step.flatten(-3, -2) if on_left else step.flatten(-2)
        step = to_core(orthogonalize(unfolding).view_as(step), before, behind)
        steps.append(step.masked_fill(still, 0.0) if isinstance(still, Tensor) else step)
    return steps


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
            "and start from step 0."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Made of a plain dict, which torch's reader fills where it runs no code."""
        return type(self), (dict(self),)


torch.serialization.add_safe_globals([TTMuonState])  # so that it is read with weights_only=True


class TTMuon(torch.optim.Optimizer):
    """Steps that move the implied matrices of a compressed model as far as AdamW moves dense ones at the same rate.

    For every core, the momentum of its gradient is moved into the orthogonal gauge, where a step on the core is an
    equal step on the matrix. Directions that a neighbour shares are removed, and the rest is orthogonalised. So every
    direction that the core can give the matrix gets an equal step. Of m cores that move, each has a step of spectral
    norm ``certainty * lr * COHERENCE * sqrt(rows * columns / m)`` in that gauge at its own bond. The iteration reaches
    0.7 to 1.2 of it. Steps of different cores are orthogonal; at full rank there is one, the step of the dense matrix.
    The certainty of a core is the norm of the mean of its last gradients over the mean of their norms. It is 1 where
    all agree, and 0.23 where they are noise (at momentum 0.9). AdamW's steps shrink in the same way.

    Neither the scale of the gradients nor, up to damping, scale and basis between the cores matter to the steps of
    cores. Weight decay shrinks the implied matrix by ``1 - lr * weight_decay``. Parameters that are no cores are
    trained by ``torch``'s AdamW. Rank gates are left out of the gauge: as they scale a rank, they scale its steps.

    A step waits for nothing on the device. Steps can be part of a CUDA graph and still follow a schedule if the ``lr``
    of each group is a scalar tensor there, best of float64. :class:`hf_comera.GraphedStep` makes it so.

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
        self._shape_groups: dict[Any, list[tuple[list[int], ShapeGroup]]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters, which are trained by AdamW, with settings of their own."""
        for name, example in (("lr", 0.001), ("weight_decay", 0.01)):
            if not isinstance(value := param_group.get(name, 0.0), Tensor):
                check_not_negative(name, value, example)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
        self._shape_groups = {}

    def _step_trains(self, group: dict[str, Any]) -> None:
        gathered: dict[tuple[Any, ...], list[TTCores]] = {}
        cores = iter(group["params"])
        for num_cores, num_left, entries in group["trains"]:
            tensor_train = TTCores([next(cores) for _ in range(num_cores)], num_left, entries)
            if any(core.grad is not None for core in tensor_train.cores):
                gathered.setdefault(tensor_train.key(), []).append(tensor_train)
        found = {}
        for key, tensor_trains in gathered.items():
            shapes = tuple(tensor_train.shapes() for tensor_train in tensor_trains)
            found[key, shapes] = self._shape_groups.get((key, shapes)) or shape_groups(tensor_trains)
            for members, shape_group in found[key, shapes]:
                self._step_shape_group(shape_group, [tensor_trains[index] for index in members], group)
        self._shape_groups = found  # without groups of ranks that have been pruned since

    def _step_shape_group(self, shape_group: ShapeGroup, tensor_trains: list[TTCores], group: dict[str, Any]) -> None:
        """Step trains of equal factors together."""
        cores = [
            [tensor_train.cores[place] for tensor_train in tensor_trains]
            for place in range(len(tensor_trains[0].cores))
        ]
        momenta, certainty = self._momenta([cores[place] for place in shape_group.places], shape_group, group)
        steps = orthogonal_steps(shape_group, _exact(shape_group.all_cores.pack(cores)), momenta)
        moving = [cores[place] for place in shape_group.moving]
        bound = group["lr"] * COHERENCE * math.sqrt(tensor_trains[0].entries)
        sizes = torch.stack([certainty[place] for place in shape_group.moving]) * shape_group.part * -bound
        parts = shape_group.moving_cores.unpack([step * size for step, size in zip(steps, sizes, strict=True)])
        kept = 1 - group["lr"] * group["weight_decay"] / len(shape_group.places)
        decayed: list[Tensor] = [core for place in shape_group.places for core in cores[place]]
        torch._foreach_mul_(decayed, kept.to(decayed[0].dtype) if isinstance(kept, Tensor) else kept)
        stepped: list[Tensor] = [core for of_place in moving for core in of_place]
        parts = [part.view_as(core).to(core.dtype) for part, core in zip(parts, stepped, strict=True)]
        torch._foreach_add_(stepped, parts)

    def _momenta(
        self, places: list[list[nn.Parameter]], shape_group: ShapeGroup, group: dict[str, Any]
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Advance the momenta of cores and look ahead along them; stacked, one for each place, and how sure they are.

        The certainty of a place, ``(trains, 1, 1, 1)`` from 0 to 1, tells how far the last gradients of its cores
        agree. It is the norm of their mean over the mean of their norms; both began at zero, so they are too small
        alike.
        """
        cores = [core for of_place in places for core in of_place]
        for core in cores:
            if core not in self.state:
                buffer = torch.zeros_like(core, memory_format=torch.preserve_format)
                self.state[core] = {"momentum_buffer": buffer, "mean_norm": core.new_zeros(())}
            follow(core, self.state[core], "momentum_buffer")
        states = [self.state[core] for core in cores]
        gradients: list[Any] = [core.grad for core in cores]  # all have one: they stand in ``places`` for it
        buffers, means = ([state[key] for state in states] for key in ("momentum_buffer", "mean_norm"))
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        stacks = shape_group.cores_with_gradient
        joined = _exact([stacks.join([gradients]), stacks.join([buffers])])
        of_gradients, of_buffers = (finite_norms(stacks.cut(each)) for each in joined)
        largest = torch.finfo(means[0].dtype).max
        norms = of_gradients.clamp_max(largest).to(means[0].dtype).unbind()
        torch._foreach_lerp_(means, norms, 1 - group["momentum"])
        mean_norms = torch.stack(means).to(of_buffers.dtype)
        certainty = (of_buffers / mean_norms.clamp_min(torch.finfo(mean_norms.dtype).tiny)).clamp_max(1.0)
        scales = (torch.maximum(of_gradients, of_buffers) / HUGE).clamp_min(1.0)
        certainties, scales = (each.view(len(places), -1, 1, 1, 1) for each in (certainty, scales))
        momenta = stacks.spread(torch.lerp(joined[0], joined[1], group["momentum"]))
        scaled = [momentum / scale for momentum, scale in zip(momenta, scales, strict=True)]
        return scaled, dict(zip(shape_group.places, certainties, strict=True))

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
