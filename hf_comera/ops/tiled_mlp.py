"""The hidden layer of a feed-forward block between two latents, a few rows at a time: it is never whole in memory.

``hidden = act(latent @ right + bias)``, times a gate where there is one, is many times wider than the latents before
and after it. It is made, used and dropped in the processor's cache, and made once more in backward. Saved are latents.

Source: recomputing what is cheap: Korthikanti et al., arXiv:2205.05198, section 5. That latents suffice is ours.
"""

# Shapes here: T = rows, H = hidden features, R = rank of the latent before, S = rank of the latent after.

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_comera.ops.autograd import gradients_of, is_transformed
from hf_comera.ops.bit_dropout import kept_factors
from hf_comera.ops.cuda import tiled_mlp as kernels
from hf_comera.ops.cuda.dispatch import register_cuda_kernel
from hf_comera.ops.precision import without_autocast

__all__ = ["ACTIVATIONS", "HiddenInput", "tiled_mlp"]

# Entries of the hidden layer at a time. On a CPU few enough for the cache that cores share, and enough for full-speed
# products; on a GPU enough to fill it.
CHUNK_ENTRIES = {"cpu": 1 << 20, "cuda": 1 << 25}

aten = torch.ops.aten


class _Activation(NamedTuple):
    function: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    """From the gradient of the result, and what the function was given."""


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _quick_gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    share = torch.sigmoid(1.702 * x)
    return grad * (share * (1 + 1.702 * x * (1 - share)))


ACTIVATIONS = {
    "gelu": _Activation(functional.gelu, aten.gelu_backward.default),
    "gelu_tanh": _Activation(
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward.default(grad, x, approximate="tanh"),
    ),
    "quick_gelu": _Activation(_quick_gelu, _quick_gelu_gradient),
    "relu": _Activation(torch.relu, lambda grad, x: aten.threshold_backward.default(grad, x, 0)),
    "relu2": _Activation(lambda x: torch.relu(x).square(), lambda grad, x: grad * (2 * torch.relu(x))),
    "silu": _Activation(functional.silu, aten.silu_backward.default),
}
"""By the names of Transformers, but ``gelu_tanh`` for all that write GELU with a tanh."""


class HiddenInput(NamedTuple):
    """A linear map into the hidden layer: ``latent @ right + bias``."""

    latent: Tensor
    """``(T, R)``."""
    right: Tensor
    """``(R, H)``, in the dtype of the latent."""
    bias: Tensor | None = None
    """``(H,)``."""

    def rows(self, chunk: slice) -> Tensor:
        """Some rows of the map."""
        rows = self.latent[chunk] @ self.right
        return rows if self.bias is None else rows.add_(self.bias)


def tiled_mlp(
    inner: HiddenInput,
    left: Tensor,
    *,
    activation: str,
    gate: HiddenInput | None = None,
    bits: Tensor | None = None,
    share: float = 1.0,
) -> Tensor:
    """``dropout(act(inner) [* gate]) @ left.T``.

    Args:
        inner: The map that the activation is applied to.
        left: Left half of the layer after the hidden one.
        activation: A name in :data:`ACTIVATIONS`.
        gate: The map that the activated one is multiplied with, if there is one.
        bits: What dropout keeps of the hidden layer, ``(T, ceil(H / 8))``, as ``ops/bit_dropout.py`` draws it.
        share: The probability of being kept.

    Shape:
        latents ``(T, R)``, left ``(S, H)`` -> ``(T, S)``, in the dtype of ``left``.
    """
    tensors = (*inner, *(gate or (None, None, None)))
    if torch.compiler.is_exporting() or is_transformed():  # other runtimes and transforms do not know the operator
        return _whole([*tensors, left], activation, share, bits)
    return _tiled_mlp(*tensors, left, bits, activation, share)


@torch.library.custom_op("hf_comera::tiled_mlp", mutates_args=())
def _tiled_mlp(
    latent: Tensor,
    right: Tensor,
    bias: Tensor | None,
    gate_latent: Tensor | None,
    gate_right: Tensor | None,
    gate_bias: Tensor | None,
    left: Tensor,
    bits: Tensor | None,
    activation: str,
    share: float,
) -> Tensor:
    inner, gate = HiddenInput(latent, right, bias), _gate(gate_latent, gate_right, gate_bias)
    result = left.new_empty(latent.shape[0], left.shape[0])
    with without_autocast(left):
        for chunk in _chunks(latent, left.shape[1]):
            hidden = ACTIVATIONS[activation].function(inner.rows(chunk))
            if gate is not None:
                hidden *= gate.rows(chunk)
            if bits is not None:
                hidden *= _factors(bits[chunk], left, share)
            torch.mm(hidden, left.T, out=result[chunk])
    return result


@_tiled_mlp.register_fake
def _(latent: Tensor, *others: Any) -> Tensor:
    left: Tensor = others[5]
    return left.new_empty(latent.shape[0], left.shape[0])


@torch.library.custom_op("hf_comera::tiled_mlp_backward", mutates_args=())
def _tiled_mlp_backward(
    grad: Tensor,
    latent: Tensor,
    right: Tensor,
    bias: Tensor | None,
    gate_latent: Tensor | None,
    gate_right: Tensor | None,
    gate_bias: Tensor | None,
    left: Tensor,
    bits: Tensor | None,
    activation: str,
    share: float,
) -> list[Tensor]:
    """Gradients of latent, right, bias, the same of the gate, and left; empty where there is no such tensor."""
    inner, gate = HiddenInput(latent, right, bias), _gate(gate_latent, gate_right, gate_bias)
    act = ACTIVATIONS[activation]
    maps = [_MapGradients(inner)] if gate is None else [_MapGradients(inner), _MapGradients(gate)]
    exact = torch.promote_types(left.dtype, torch.float32)
    dleft = torch.zeros_like(left, dtype=exact)
    with without_autocast(left):
        for chunk in _chunks(latent, left.shape[1]):
            wide, gate_rows = inner.rows(chunk), None if gate is None else gate.rows(chunk)
            activated, dhidden = act.function(wide), grad[chunk] @ left
            hidden = activated if gate_rows is None else activated * gate_rows
            if bits is not None:
                factors = _factors(bits[chunk], left, share)
                hidden = hidden * factors
                dhidden *= factors
            _add_product(dleft, grad[chunk].T, hidden)
            if gate_rows is not None:
                maps[1].add(chunk, dhidden * activated)
                dhidden *= gate_rows
            maps[0].add(chunk, act.gradient(dhidden, wide))
    found = [tensor for each in maps for tensor in each.results()]
    return [*found, *(left.new_empty(0) for _ in range(6 - len(found))), dleft.to(left.dtype)]


@_tiled_mlp_backward.register_fake
def _(grad: Tensor, *arguments: Any) -> list[Tensor]:
    *maps, left = arguments[:7]
    return [left.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in (*maps, left)]


def _by_kernel(*arguments: Any) -> Tensor:
    return kernels.tiled_mlp(**_operands(*arguments))


def _backward_by_kernel(grad: Tensor, *arguments: Any) -> list[Tensor]:
    operands = _operands(*arguments)
    wide, *dlatents = kernels.tiled_mlp_backward(grad, **operands)
    rights, left, biases = operands["rights"], operands["left"], operands["biases"]
    dtype, ranks = left.dtype, [right.shape[0] for right in rights]
    rows = wide.split([*ranks, left.shape[0], len(rights)])
    # copies: results of an operator may not share memory
    *drights, dleft, dbiases = (part.to(dtype, copy=True).contiguous() for part in rows)
    found: list[Tensor] = []
    for index, (dlatent, dright, bias) in enumerate(zip(dlatents, drights, biases, strict=True)):
        found += [dlatent, dright, left.new_empty(0) if bias is None else dbiases[index].clone()]
    return [*found, *(left.new_empty(0) for _ in range(6 - len(found))), dleft]


def _operands(*arguments: Any) -> dict[str, Any]:
    """The arguments of the operator as the kernels take them."""
    latent, right, bias, gate_latent, gate_right, gate_bias, left, bits, activation, share = arguments
    inputs = [HiddenInput(latent, right, bias)]
    if (gate := _gate(gate_latent, gate_right, gate_bias)) is not None:
        inputs.append(gate)
    latents, rights, biases = zip(*inputs, strict=True)
    masks = [] if bits is None else [kept_factors(bits, left.shape[1], True, torch.bool)]
    operands = {"latents": latents, "rights": rights, "biases": biases, "masks": masks, "left": left}
    return {**operands, "activation": activation, "scale": None if bits is None else 1 / share}


register_cuda_kernel(_tiled_mlp, _by_kernel)
register_cuda_kernel(_tiled_mlp_backward, _backward_by_kernel)


class _MapGradients:
    """Sums over chunks for one map into the hidden layer, not rounded to 16 bits."""

    def __init__(self, part: HiddenInput) -> None:
        exact = torch.promote_types(part.latent.dtype, torch.float32)
        self.part, self.dlatent = part, torch.empty_like(part.latent)
        self.dright = torch.zeros_like(part.right, dtype=exact)
        self.dbias = None if part.bias is None else torch.zeros_like(part.bias, dtype=exact)

    def add(self, chunk: slice, dwide: Tensor) -> None:
        torch.mm(dwide, self.part.right.T, out=self.dlatent[chunk])
        _add_product(self.dright, self.part.latent[chunk].T, dwide)
        if self.dbias is not None:
            self.dbias += dwide.sum(0, dtype=self.dbias.dtype)

    def results(self) -> list[Tensor]:
        dtype = self.part.right.dtype
        dbias = self.dright.new_empty(0) if self.dbias is None else self.dbias
        return [self.dlatent, self.dright.to(dtype), dbias.to(dtype)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.share = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    with without_autocast(grad):
        if torch.is_grad_enabled():  # second derivatives: with a graph, and the hidden layer whole
            options = {"activation": ctx.activation, "share": ctx.share, "bits": tensors[-1]}
            found = gradients_of(lambda them: _whole(them, **options), tensors[:-1], grad, create_graph=True)
        else:
            given = _tiled_mlp_backward(grad, *tensors, ctx.activation, ctx.share)
            found = [None if old is None else new for old, new in zip(tensors[:-1], given, strict=True)]
    return (*found, None, None, None)


_tiled_mlp.register_autograd(_backward, setup_context=_save)


def _whole(tensors: list[Any], activation: str, share: float, bits: Tensor | None) -> Tensor:
    """The same by differentiable functions."""
    inner, left, rows = HiddenInput(*tensors[:3]), tensors[6], slice(None)
    hidden = ACTIVATIONS[activation].function(_added(inner))
    if tensors[3] is not None:
        hidden = hidden * _added(HiddenInput(*tensors[3:6]))
    if bits is not None:
        hidden = hidden * _factors(bits[rows], left, share)
    return hidden @ left.T


def _added(part: HiddenInput) -> Tensor:
    rows = part.latent @ part.right
    return rows if part.bias is None else rows + part.bias


def _gate(latent: Tensor | None, right: Tensor | None, bias: Tensor | None) -> HiddenInput | None:
    return None if latent is None or right is None else HiddenInput(latent, right, bias)


def _factors(bits: Tensor, left: Tensor, share: float) -> Tensor:
    """The factors of dropout."""
    return kept_factors(bits, left.shape[1], 1 / share, left.dtype)


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    else:
        total += one @ other


def _chunks(latent: Tensor, hidden: int) -> Iterator[slice]:
    """Rows that are computed at a time."""
    step = max(1, CHUNK_ENTRIES.get(latent.device.type, CHUNK_ENTRIES["cuda"]) // max(1, hidden))
    for start in range(0, len(latent), step):
        yield slice(start, start + step)
