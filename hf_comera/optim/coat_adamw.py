"""``CoatAdamW``: AdamW whose moments are kept in E4M3, a good quarter of the bytes."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_comera.ops.cuda.coat_adamw import coat_adamw_step
from hf_comera.ops.cuda.dispatch import kernels_serve, register_cuda_kernel
from hf_comera.ops.fp8 import decode, encode
from hf_comera.optim.flat_groups import FlatGroups, Layout, layout_of, local_part
from hf_comera.optim.moved_state import check_saved_shapes
from hf_comera.optim.param_groups import check_not_negative, take_saved_groups

__all__ = [
    "MOMENTS",
    "CoatAdamW",
    "Piece",
    "alike",
    "batches",
    "entries_at_once",
    "gathered",
    "is_spread",
    "keep_own_rows",
    "layout_of_state",
    "load_moment",
    "new_state",
    "plain_moment",
    "quantised_moment",
    "store_moment",
]


class Piece(NamedTuple):
    """A run of rows of a parameter, its gradient and its state, by their names, as far as this process holds them."""

    layout: Layout
    tensors: dict[str, Tensor]


def alike(pieces: Iterable[Piece]) -> Iterable[list[Piece]]:
    """Those that one call of an operator takes: of equal dtypes and device, with moments of one kind."""
    found: dict[Any, list[Piece]] = {}
    for piece in pieces:
        value = piece.tensors["value"]
        kind = (value.dtype, value.device, value.is_contiguous(), piece.tensors["gradient"].dtype)
        found.setdefault((*kind, *piece.tensors), []).append(piece)
    return found.values()


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Runs of rows that are stepped together: of equal dtypes, device and group size, and not too many at once."""
    begun: dict[Any, tuple[list[Piece], int]] = {}
    for piece in chain.from_iterable(map(_cut, pieces)):
        value, layout = piece.tensors["value"], piece.layout
        key = (value.dtype, value.device, piece.tensors["gradient"].dtype, layout.size, layout.is_quantised)
        batch, num_entries = begun.pop(key, ([], 0))
        num_new = layout.num_groups * layout.size
        if batch and num_entries + num_new > entries_at_once(value.device):
            yield batch
            batch, num_entries = [], 0
        begun[key] = ([*batch, piece], num_entries + num_new)
    yield from (batch for batch, _ in begun.values())


def entries_at_once(device: torch.device) -> int:
    """How many entries are processed together: as few as the cost of calls allows, on a CPU as caches hold."""
    return 2**18 if device.type == "cpu" else 2**22


def _cut(piece: Piece) -> Iterator[Piece]:
    """One parameter in runs of rows with a bounded number of entries; whole if it is not quantised."""
    layout, tensors = piece
    num_rows = max(entries_at_once(tensors["value"].device) // max(layout.length, 1), 1)
    if not layout.is_quantised or layout.num_rows <= num_rows:
        if layout.num_rows:
            yield piece
        return
    for start in range(0, layout.num_rows, num_rows):
        part = layout._replace(num_rows=min(num_rows, layout.num_rows - start))
        rows = {key: value.narrow(0, start, part.num_rows) for key, value in tensors.items() if key != "step"}
        yield Piece(part, {"step": tensors["step"], **rows})


MOMENTS = ("exp_avg", "exp_avg_sq")


def layout_of_state(parameter: Tensor) -> Layout:
    """How this process keeps the moments of a parameter: by its whole shape, so that sharding changes nothing."""
    layout = layout_of(parameter.shape)
    if layout.is_whole:
        return layout
    local = local_part(parameter)
    return layout._replace(num_rows=local.shape[0] if layout.is_quantised else local.numel())


def is_spread(parameter: Tensor, layout: Layout) -> bool:
    """Whether every process keeps the whole state of a parameter of which it holds a part only."""
    return layout.is_whole and hasattr(parameter, "to_local")


def gathered(parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The whole value and the whole gradient of a sharded parameter, of all processes in one call."""
    value, gradient = local_part(parameter.detach()), local_part(gradient)
    exact = torch.promote_types(value.dtype, torch.float32)
    both = torch.stack([value.to(exact), gradient.to(exact)], -1)
    whole = _placed(both, parameter, (*parameter.shape, 2)).full_tensor()  # type: ignore[attr-defined]
    value, gradient = whole.unbind(-1)
    return value.contiguous(), gradient


def keep_own_rows(parameter: Tensor, whole: Tensor) -> None:
    """Write this process's part of a whole value into a sharded parameter."""
    local_part(parameter.detach()).copy_(local_part(_sharded(whole, parameter)))


def new_state(parameter: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Of a parameter that has not been stepped."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step} | _empty_moment(MOMENTS[0], parameter, layout) | _empty_moment(MOMENTS[1], parameter, layout)


def plain_moment(key: str, parameter: Tensor, state: dict[str, Any]) -> Tensor:
    """A moment of a parameter in its shape, in float32; sharded as it is."""
    layout = layout_of_state(parameter)
    flat, codes = FlatGroups([layout]), local_part(state[key])
    plain = torch.zeros_like(codes, dtype=torch.float32)
    flat.scatter(load_moment(flat, key, [state]), [plain])
    return _sharded(plain, parameter) if is_spread(parameter, layout) else _placed(plain, parameter, parameter.shape)


def quantised_moment(key: str, parameter: Tensor, plain: Tensor) -> dict[str, Tensor]:
    """The stored form of a moment that comes in the parameter's shape; sharded as the moment is."""
    layout = layout_of_state(parameter)
    if not layout.is_quantised:
        return {key: plain.to(torch.promote_types(parameter.dtype, torch.float32))}
    whole = plain.full_tensor() if layout.is_whole and hasattr(plain, "full_tensor") else local_part(plain)
    moment, flat = _empty_moment(key, parameter, layout), FlatGroups([layout])
    store_moment(flat, key, flat.gather([whole.float()]), [moment])
    return moment


def load_moment(flat: FlatGroups, key: str, states: Sequence[dict[str, Any]]) -> Tensor:
    """A moment of some parameters as groups."""
    kept = flat.gather([local_part(state[key]) for state in states])
    if not flat.layouts[0].is_quantised:
        return kept
    scales = flat.gather_scales([local_part(state[f"{key}_scales"]) for state in states])
    return decode(kept, scales, has_signs=key == MOMENTS[0])


def store_moment(flat: FlatGroups, key: str, groups: Tensor, states: Sequence[dict[str, Any]]) -> None:
    """Keep groups as a moment of some parameters."""
    if flat.layouts[0].is_quantised:
        groups, scales = encode(groups.float(), keep_positive=key == MOMENTS[1])
        flat.scatter_scales(scales, [local_part(state[f"{key}_scales"]) for state in states])
    flat.scatter(groups, [local_part(state[key]) for state in states])


def _empty_moment(key: str, parameter: Tensor, layout: Layout) -> dict[str, Tensor]:
    """A moment of zero."""
    local, is_whole = local_part(parameter), layout.is_whole
    # not float8_e4m3fn: not every collective and saver takes it
    dtype = torch.uint8 if layout.is_quantised else torch.promote_types(parameter.dtype, torch.float32)
    codes = local.new_zeros(parameter.shape if is_whole else local.shape, dtype=dtype)
    moment = {key: _placed(codes, parameter, parameter.shape, is_whole=is_whole)}
    if layout.is_quantised:
        scales = local.new_ones(layout.scales_shape, dtype=torch.float32)
        scales_shape = layout.scales_shape if is_whole else (parameter.shape[0], *layout.scales_shape[1:])
        moment[f"{key}_scales"] = _placed(scales, parameter, scales_shape, is_whole=is_whole)
    return moment


def _placed(local: Tensor, parameter: Tensor, shape: Sequence[int], *, is_whole: bool = False) -> Tensor:
    """``local`` as this process's part of a tensor that is sharded as ``parameter`` is, or that every process has."""
    if not hasattr(parameter, "to_local"):
        return local
    from torch.distributed.tensor import DTensor, Replicate

    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride()
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    placements = [Replicate()] * mesh.ndim if is_whole else parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _sharded(whole: Tensor, parameter: Tensor) -> Tensor:
    """A tensor that every process holds whole, sharded as ``parameter`` is; sends nothing."""
    placed = _placed(whole, parameter, parameter.shape, is_whole=True)
    return placed.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


MOST = 2.0**63
"""Larger entries of gradients count as this, also in ``kernels/coat_adamw.cu``: codes have no infinity."""

_KEPT = [key + suffix for key in MOMENTS for suffix in ("", "_scales")]
"""The names in the state under which the moments of a parameter are stored."""


class CoatAdamW(torch.optim.Optimizer):
    """AdamW with both moments in E4M3, in groups whose dynamic range is expanded: 2.13 bytes a parameter, not 8.

    Computes as ``torch.optim.AdamW`` in float32, or in float64 for parameters of that dtype. A step uses the new
    moments before they are rounded. Groups of 128 entries lie within one index of a parameter's first axis, so
    sharding along it (FSDP2) changes nothing. Small parameters whose rows are too short for that (biases, norms,
    gates, some cores) are grouped as a whole. Where they are sharded, every process keeps their state and gathers
    their gradients. Below 8 entries moments stay in float32.

    On a GPU a kernel does the whole step where kernels are switched on (``hf_comera.ops.use_kernels()``).

    Nothing is read from the device, and state keeps its memory, so a step can be captured in a CUDA graph;
    :class:`hf_comera.GraphedStep` does it. In a graph of your own, a learning rate that changes between replays has to
    be a tensor on the device.

    Args:
        params: Parameters or groups, for example ``comera_param_groups(model, lr=1e-3)``.
        lr: Learning rate, a number or a tensor of one entry.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.

    Raises:
        ValueError: If a setting is out of range, a gradient is sparse, or a parameter is complex or sharded along
            another axis than the first.

    Source:
        COAT, arXiv:2410.19313, section 4.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_group({**defaults, "params": []})  # also where every group has settings of its own
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters, with settings of their own."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

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
        for group in self.param_groups:
            moving = self._counted(group["params"])
            spread = (each for each in moving if is_spread(each, layout_of_state(each)))
            whole = {each: gathered(each, moving[each]) for each in spread}
            for pieces in alike(self._pieces(moving, whole)):
                tensors = pieces[0].tensors
                if kernels_serve(tensors["value"].device) and tensors.keys() >= set(_KEPT):
                    _by_operator(pieces, group)
                else:
                    _in_batches(pieces, group)
            for parameter, (value, _) in whole.items():
                keep_own_rows(parameter, value)
        return loss

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as it was saved; float moments, as those of ``torch.optim.AdamW``, are quantised.

        Where parameters have names, as those of :func:`comera_param_groups`, the groups become those of the state.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            ValueError: If the state is of an optimizer without these moments, or of one that maximizes or has a third
                moment. Also if it is of parameters with other names or shapes. Nothing is changed then.
        """
        for name in ("maximize", "amsgrad"):
            if any(group.get(name) for group in state_dict["param_groups"]):
                raise ValueError(f"The state is of an optimizer with {name}=True, which CoatAdamW has not.")
        for state in state_dict["state"].values():
            if lacking := {"step", *MOMENTS} - state.keys():
                raise ValueError(
                    f"The state lacks {sorted(lacking)}; it has {sorted(state)}. Load one of CoatAdamW or AdamW."
                )
        final: dict[str, Any] = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, loaded: final.update(self._prepared(loaded)))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        saved = chain.from_iterable(group["params"] for group in final["param_groups"])
        held = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved, held, strict=True):
            exact = {  # torch casts all state to the dtype of the parameter
                key: value.to(device=parameter.device, copy=True) if isinstance(value, Tensor) else value
                for key, value in final["state"].get(index, {}).items()
            }
            if exact:
                del self.state[parameter]  # may share memory with the state that is loaded
                self.set_plain_state(parameter, exact)

    def _prepared(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """The state to load, as other hooks left it, in groups of its own."""
        before = self.param_groups[:]
        take_saved_groups(self, loaded["param_groups"])
        try:
            check_saved_shapes(self, loaded, MOMENTS)
        except ValueError:
            self.param_groups[:] = before
            raise
        return loaded

    def plain_state(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter with moments in its shape, in float32; a copy, empty before the first step."""
        state = dict(self.state.get(parameter, {}))
        if f"{MOMENTS[0]}_scales" in state:
            for key in MOMENTS:
                state[key] = plain_moment(key, parameter, state)
                del state[f"{key}_scales"]
        return state

    def set_plain_state(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Make this the state of a parameter; moments that are not quantised yet are.

        State that the parameter has already keeps its memory, where captured steps go on writing.

        Args:
            parameter: It need not be held by the optimizer yet.
            state: As :meth:`plain_state` returns it, or as it is kept.
        """
        new = dict(state)
        for key in MOMENTS:
            if f"{key}_scales" not in new:
                new |= quantised_moment(key, parameter, state[key])
        new["step"] = torch.as_tensor(new["step"], dtype=torch.float32, device=parameter.device)
        held = self.state.get(parameter, {})
        for key in new.keys() & held.keys():
            if _kind(held[key]) == _kind(new[key]):
                new[key] = held[key].copy_(new[key])
        self.state[parameter] = new

    def _counted(self, parameters: list[Tensor]) -> dict[Tensor, Tensor]:
        """Those with a gradient, and it; all have a state, and this step is counted in it."""
        moving = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        for parameter, gradient in moving.items():
            if not self.state[parameter]:
                self.state[parameter] = new_state(parameter, layout_of_state(parameter))
            if gradient.is_sparse:
                raise ValueError("A gradient is sparse, and moments are not. Make the embedding with sparse=False.")
        if moving:
            torch._foreach_add_([self.state[parameter]["step"] for parameter in moving], 1)
        return moving

    def _pieces(self, moving: dict[Tensor, Tensor], whole: dict[Tensor, tuple[Tensor, Tensor]]) -> Iterator[Piece]:
        """All parameters that move, as far as this process holds them or has gathered them."""
        for parameter, own in moving.items():
            value, gradient = whole.get(parameter) or (parameter.detach(), own)
            kept = {"value": value, "gradient": gradient, **self.state[parameter]}
            yield Piece(layout_of_state(parameter), {key: local_part(kept[key]) for key in kept})


def _by_operator(pieces: list[Piece], group: dict[str, Any]) -> None:
    """Step quantised parameters by the operator; on a CPU its hundreds of arguments would cost time."""
    values, gradients, steps = ([piece.tensors[key] for piece in pieces] for key in ("value", "gradient", "step"))
    moments = [piece.tensors[key] for piece in pieces for key in _KEPT]
    rate = group["lr"].detach() if isinstance(group["lr"], Tensor) else None
    numbers = {"lr": 0.0 if rate is not None else float(group["lr"]), "betas": list(group["betas"])}
    numbers |= {"eps": group["eps"], "weight_decay": group["weight_decay"]}
    sizes = [number for piece in pieces for number in piece.layout[:3]]
    _coat_adamw(values, gradients, moments, steps, rate, sizes=sizes, **numbers)


@torch.library.custom_op("hf_comera::coat_adamw", mutates_args=("values", "moments"))
def _coat_adamw(
    values: list[Tensor],
    gradients: list[Tensor],
    moments: list[Tensor],
    steps: list[Tensor],
    rate: Tensor | None,
    *,
    sizes: list[int],
    lr: float,
    betas: list[float],
    eps: float,
    weight_decay: float,
) -> None:
    """A step of quantised parameters of equal dtypes; ``moments`` are four tensors and ``sizes`` three a parameter."""
    keys = ("value", "gradient", "step", *_KEPT)
    kept = [moments[place :: len(_KEPT)] for place in range(len(_KEPT))]
    tensors = [dict(zip(keys, of_one, strict=True)) for of_one in zip(values, gradients, steps, *kept, strict=True)]
    layouts = (Layout._make((*sizes[start : start + 3], True, False)) for start in range(0, len(sizes), 3))
    rule = {"lr": lr if rate is None else rate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    _in_batches(map(Piece, layouts, tensors), rule)


register_cuda_kernel(_coat_adamw, coat_adamw_step)


def _in_batches(pieces: Iterable[Piece], group: dict[str, Any]) -> None:
    for batch in batches(pieces):
        _step_together(batch, group)


def _step_together(pieces: list[Piece], group: dict[str, Any]) -> None:
    """AdamW's rule on one matrix of groups."""
    flat, tensors = FlatGroups([piece.layout for piece in pieces]), [piece.tensors for piece in pieces]
    values = [each["value"] for each in tensors]
    exact = torch.promote_types(values[0].dtype, torch.float32)
    steps = flat.spread([each["step"] for each in tensors])
    corrections = [_correction(steps, beta) for beta in group["betas"]]
    gradients = _bounded(flat.gather([each["gradient"] for each in tensors]).to(exact))
    first, second = (load_moment(flat, key, tensors).to(exact) for key in MOMENTS)
    beta_1, beta_2 = group["betas"]
    first.lerp_(gradients, 1 - beta_1)
    second.mul_(beta_2).addcmul_(gradients, gradients, value=1 - beta_2)
    for key, moment in zip(MOMENTS, (first, second), strict=True):
        store_moment(flat, key, moment, tensors)
    denominators = second.sqrt_().div_(corrections[1].sqrt_()).add_(group["eps"]).mul_(corrections[0])
    new = flat.gather(values).to(exact).mul_(1 - group["lr"] * group["weight_decay"])
    flat.scatter(new.sub_(first.div_(denominators).mul_(group["lr"])), values)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, getattr(tensor, "placements", None)


def _bounded(gradients: Tensor) -> Tensor:
    """Finite gradients limited to :data:`MOST`; infinite ones become NaN, as in FP8 codes."""
    return gradients.clamp(-MOST, MOST).add_(gradients, alpha=0)


def _check_group(group: dict[str, Any]) -> None:
    rate, (beta_1, beta_2) = group["lr"], group["betas"]
    if not isinstance(rate, Tensor):  # of one, a step reads nothing on the host
        check_not_negative("lr", rate, 0.001)
    for name, beta in (("betas[0]", beta_1), ("betas[1]", beta_2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name}={beta} must be at least 0 and less than 1, for example 0.9.")
    for name, example in (("eps", 1e-8), ("weight_decay", 0.01)):
        check_not_negative(name, group[name], example)
    for parameter in group["params"]:
        if parameter.is_complex():
            raise ValueError(f"A parameter is {parameter.dtype}; moments are kept in E4M3, which is real. Use AdamW.")
        if any(placement.is_shard() and placement.dim != 0 for placement in getattr(parameter, "placements", ())):
            raise ValueError(
                f"A parameter is sharded as {parameter.placements}, which may divide groups of its moments. Shard it "
                "along axis 0, the default of fully_shard."
            )


def _correction(steps: Tensor, beta: float) -> Tensor:
    """``1 - beta ** steps`` without the cancellation."""
    return torch.expm1(steps * (math.log(beta) if beta else -math.inf)).neg()
