"""What ``CoatAdamW`` keeps of a parameter, sharded or not: moments as codes and scales; tiny ones in float."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_comera.ops.fp8 import decode, encode
from hf_comera.optim.flat_groups import FlatGroups, Layout, layout_of, local_part

__all__ = [
    "MOMENTS",
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


def gathered(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The whole value and the whole gradient of a sharded parameter, of all processes in one call."""
    value, gradient = local_part(parameter.detach()), local_part(parameter.grad)
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
    """What is kept of a moment that comes in the parameter's shape; sharded as it is."""
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
    mesh = parameter.device_mesh
    placements = [Replicate()] * mesh.ndim if is_whole else parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _sharded(whole: Tensor, parameter: Tensor) -> Tensor:
    """What every process has, sharded as ``parameter`` is; sends nothing."""
    placed = _placed(whole, parameter, parameter.shape, is_whole=True)
    return placed.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
