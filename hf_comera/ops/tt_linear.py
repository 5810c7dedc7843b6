"""The operator ``hf_comera::tt_linear``: ``y = x W + bias`` with W held as tensor-train cores and never formed.

The first ``num_in`` cores carry the input factors, the rest the output factors. The cores are contracted to two
halves, ``W = left @ right``; ``code = x @ left`` has one number per rank and token, and ``y = code @ right``. With a
rank activation, ``y = act(code) @ right``, which no single matrix computes.

The plain-torch body below is the reference and the path of every device without a kernel.

Source: CoMERA, arXiv:2405.14377, section on contraction paths: two-sided contraction; saved for backward are x and the
code only, the products of cores do not depend on the batch and are built again. The saved code is the one before the
rank activation, from which the activation and its derivative are computed again.
"""

# Shapes here: I = in features, O = out features, R = middle rank rounded up to a multiple of RANK_MULTIPLE,
# ... = any leading axes (batch, tokens), T = their product.

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.precision import autocast_input, chain_dtype, without_autocast
from hf_comera.ops.rank_activation import RANK_ACTIVATIONS, check_rank_activation
from hf_comera.tt.cores import contract_left, contract_left_backward, contract_right, contract_right_backward

__all__ = ["tt_linear"]

# CPU libraries are markedly faster with 32 columns than with 30, and GPUs fill whole tensor-core tiles.
RANK_MULTIPLE = 8


class _Halves(NamedTuple):
    """``left_IR`` and ``right_RO``, and what their backward needs."""

    left: Tensor
    right: Tensor
    in_cores: list[Tensor]
    out_cores: list[Tensor]
    prefixes: list[Tensor]
    suffixes: list[Tensor]


def tt_linear(
    x: Tensor,
    cores: list[Tensor],
    num_in: int,
    bias: Tensor | None = None,
    out_features: int | None = None,
    rank_activation: str | None = None,
) -> Tensor:
    """``x @ W + bias`` for a matrix ``W = left @ right`` in tensor-train form, or ``act(x @ left) @ right + bias``.

    Args:
        x: Input. Under autocast it is cast first, as ``torch.nn.functional.linear`` does.
        cores: ``(r_{k-1}, n_k, r_k)``; the product of the first ``num_in`` factors is at least ``x.shape[-1]``.
        num_in: How many cores carry input factors; at least 1, and fewer than ``len(cores)``.
        bias: ``(out_features,)`` or None.
        out_features: Output size where the output factors are padded; default is their product.
        rank_activation: ``"silu"``, ``"gelu"`` (exact) or None: the nonlinearity between the halves.

    Shape:
        ``(..., in_features) -> (..., out_features)``.

    Returns:
        ``y`` in the dtype of ``x`` (of autocast, where it is on).

    Raises:
        ValueError: If the input factors cannot cover the last axis of ``x``, or ``rank_activation`` is unknown.

    Source:
        CoMERA, arXiv:2405.14377; rank activation: CoLA, arXiv:2502.10940.
    """
    check_rank_activation(rank_activation)
    covered = 1
    for core in cores[:num_in]:
        covered *= core.shape[1]
    if x.shape[-1] > covered:
        raise ValueError(
            f"x has {x.shape[-1]} features, but the {num_in} input cores cover {covered}. "
            f"Pass x with a last axis of at most {covered}."
        )
    if out_features is None:
        out_features = 1
        for core in cores[num_in:]:
            out_features *= core.shape[1]
    x = autocast_input(x)
    with without_autocast(x):
        y, _ = _tt_linear(x, cores, bias, num_in, out_features, rank_activation)
    return y


@torch.library.custom_op("hf_comera::tt_linear", mutates_args=())
def _tt_linear(
    x: Tensor,
    cores: list[Tensor],
    bias: Tensor | None,
    num_in: int,
    out_features: int,
    rank_activation: str | None,
) -> tuple[Tensor, Tensor]:
    halves = _halves(cores, num_in, x.shape[-1], out_features)
    left_IR, right_RO = halves.left.to(x.dtype), halves.right.to(x.dtype)
    code_TR = x.reshape(-1, x.shape[-1]) @ left_IR
    hidden_TR = code_TR if rank_activation is None else RANK_ACTIVATIONS[rank_activation].function(code_TR)
    y_TO = hidden_TR @ right_RO if bias is None else torch.addmm(bias.to(x.dtype), hidden_TR, right_RO)
    return y_TO.view(*x.shape[:-1], out_features), code_TR.view(*x.shape[:-1], code_TR.shape[-1])


@_tt_linear.register_fake
def _(
    x: Tensor,
    cores: list[Tensor],
    bias: Tensor | None,
    num_in: int,
    out_features: int,
    rank_activation: str | None,
) -> tuple[Tensor, Tensor]:
    rank = _padded_rank(cores[num_in].shape[0])
    return x.new_empty(*x.shape[:-1], out_features), x.new_empty(*x.shape[:-1], rank)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, cores, bias, ctx.num_in, ctx.out_features, ctx.rank_activation = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], *cores)


def _backward(ctx: Any, grad_y: Tensor | None, grad_code: Tensor | None) -> tuple[Any, ...]:
    x, code, *cores = ctx.saved_tensors
    with without_autocast(x):
        return _gradients(ctx, x, code, cores, grad_y, grad_code)


def _gradients(
    ctx: Any, x: Tensor, code: Tensor, cores: list[Tensor], grad_y: Tensor | None, grad_code: Tensor | None
) -> tuple[Any, ...]:
    halves = _halves(cores, ctx.num_in, x.shape[-1], ctx.out_features)
    left_IR, right_RO = halves.left.to(x.dtype), halves.right.to(x.dtype)
    x_TI, code_TR = x.reshape(-1, x.shape[-1]), code.reshape(-1, code.shape[-1])
    if grad_y is None:
        grad_y = x.new_zeros(*x.shape[:-1], ctx.out_features)
    dy_TO = grad_y.reshape(-1, ctx.out_features).to(x.dtype)
    hidden_TR, dcode_TR = code_TR, dy_TO @ right_RO.T
    if ctx.rank_activation is not None:
        activation = RANK_ACTIVATIONS[ctx.rank_activation]
        hidden_TR, dcode_TR = activation.function(code_TR), activation.backward(dcode_TR, code_TR)
    if grad_code is not None:
        dcode_TR = dcode_TR + grad_code.reshape(code_TR.shape)
    dx = (dcode_TR @ left_IR.T).reshape(x.shape) if ctx.needs_input_grad[0] else None
    dbias = None if ctx.bias_dtype is None else dy_TO.sum(0).to(ctx.bias_dtype)
    dcores: list[Any] = [None] * len(cores)
    if any(core.requires_grad for core in cores):
        dcores = _core_gradients(halves, x_TI.T @ dcode_TR, hidden_TR.T @ dy_TO, cores)
    return dx, dcores, dbias, None, None, None


def _core_gradients(halves: _Halves, dleft_IR: Tensor, dright_RO: Tensor, cores: list[Tensor]) -> list[Tensor]:
    """Gradients of the halves, padded to what the cores cover, sent back through both chains, cut to the true rank."""
    dtype = halves.left.dtype
    missing_rows = halves.prefixes[-1].shape[0] - dleft_IR.shape[0]
    missing_columns = halves.suffixes[0].shape[1] - dright_RO.shape[1]
    dleft, dright = dleft_IR.to(dtype), dright_RO.to(dtype)
    if missing_rows:
        dleft = pad(dleft, (0, 0, 0, missing_rows))
    if missing_columns:
        dright = pad(dright, (0, missing_columns))
    grads = contract_left_backward(halves.in_cores, halves.prefixes, dleft)
    grads += contract_right_backward(halves.out_cores, halves.suffixes, dright)
    return [grad[: core.shape[0], :, : core.shape[2]].to(core.dtype) for grad, core in zip(grads, cores, strict=True)]


_tt_linear.register_autograd(_backward, setup_context=_save)


def _halves(cores: list[Tensor], num_in: int, in_features: int, out_features: int) -> _Halves:
    """``left`` and ``right`` with W = left @ right, their middle rank padded with zeros."""
    dtype = chain_dtype(cores[0])
    in_cores = [core.to(dtype) for core in cores[:num_in]]
    out_cores = [core.to(dtype) for core in cores[num_in:]]
    extra = _padded_rank(out_cores[0].shape[0]) - out_cores[0].shape[0]
    if extra:
        in_cores[-1] = pad(in_cores[-1], (0, extra))
        out_cores[0] = pad(out_cores[0], (0, 0, 0, 0, 0, extra))
    prefixes, suffixes = contract_left(in_cores), contract_right(out_cores)
    left_IR, right_RO = prefixes[-1][:in_features], suffixes[0][:, :out_features]
    return _Halves(left_IR, right_RO, in_cores, out_cores, prefixes, suffixes)


def _padded_rank(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
