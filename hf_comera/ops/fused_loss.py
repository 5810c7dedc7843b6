"""Cross-entropy of a head without whole logits: chunks of labelled tokens, loss and gradients in one pass.

Logits of a whole batch take more memory than the rest of a compressed model, and tokens without a label need none. A
chunk's logits become its part of the loss, then, in place, their own gradient. From it come gradients of the hidden
states and of the table. So logits are computed once, in memory that all chunks share, and never saved.

Source: Liger Kernel, arXiv:2410.10989, fused linear cross-entropy.
"""

# Shapes here: T = tokens, C = tokens of a chunk, V = vocabulary, E = width of the table.

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_comera.ops.precision import autocast_input, without_autocast

__all__ = ["IGNORED", "fixed_shapes", "has_values", "head_cross_entropy", "is_recorded"]

IGNORED = -100
"""The label of tokens without one, as everywhere in Transformers."""

CHUNK_ENTRIES = 1 << 24
"""Logits at once (64 MB in float32): enough tokens for products at full speed."""

TOKEN_MULTIPLE = 16
"""Chunks are padded to a multiple of it. With other numbers of tokens a CPU's product takes 1.5 times as long."""


def head_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, ignore_index: int = IGNORED
) -> Tensor:
    """The sum of ``cross_entropy(x @ weight.T + bias, labels)`` over the tokens that have a label.

    For its gradients it keeps one tensor of the size of ``x`` and one of the size of ``weight``.

    Args:
        x: Hidden states. Under autocast they are cast first, as ``torch.nn.functional.linear`` does.
        weight: The table of the head.
        bias: The bias of the head, or None.
        labels: Ids below V, or ``ignore_index``.
        ignore_index: The label of tokens that have none.

    Shape:
        ``x (..., E)``, ``weight (V, E)``, ``bias (V,)``, ``labels (...)``; the sum has no axes.

    Returns:
        The sum, in float32 (float64 for float64), 0 where no token has a label.

    Raises:
        ValueError: If ``labels`` does not have an integer for each token.
        IndexError: If a label is no id; on a CPU only, since others would have to be waited for.
    """
    _check_labels(x, labels, weight.shape[0], ignore_index)
    x = autocast_input(x)
    differentiable = (x, weight) if bias is None else (x, weight, bias)
    with_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable)
    flat = x.reshape(-1, x.shape[-1]), labels.to(x.device, torch.int64).reshape(-1)
    with without_autocast(x):
        compiled_for_gpu = x.is_cuda and torch.compiler.is_compiling()  # may be recorded in a CUDA graph
        fixed = is_recorded(x) or not has_values(x) or compiled_for_gpu
        loss, *_ = _head_cross_entropy(
            flat[0], weight, bias, flat[1], ignore_index, with_gradients=with_gradients, fixed_shapes=fixed
        )
    return loss


def _check_labels(x: Tensor, labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels has dtype {labels.dtype}, but ids are needed, for example labels.long().")
    if x.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}, but there are tokens of shape {tuple(x.shape[:-1])}. Give an id "
            f"for each token, or {ignore_index} where there is none."
        )
    if labels.device.type != "cpu" or not has_values(labels) or is_recorded(labels) or torch.compiler.is_compiling():
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))]
    if wrong.numel():
        raise IndexError(
            f"labels holds {wrong[0].item()}, but the vocabulary has ids from 0 to {vocabulary - 1}. Tokens without a "
            f"label have {ignore_index}."
        )


@torch.library.custom_op("hf_comera::head_cross_entropy", mutates_args=())
def _head_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    *,
    with_gradients: bool,
    fixed_shapes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients to x, weight and bias: empty without ``with_gradients``."""
    loss, dx, dweight, dbias = _results(x, weight, bias, with_gradients)
    table_VE = weight.to(x.dtype)
    chunk = TOKEN_MULTIPLE * max(1, round(CHUNK_ENTRIES / weight.shape[0] / TOKEN_MULTIPLE))
    memory = x.new_empty(0)
    for tokens, counted in _tokens(labels, ignore_index, chunk, fixed_shapes):
        x_CE, labels_C = x[tokens], labels[tokens]
        if counted is not None:  # what is not counted may be no id
            labels_C = labels_C.masked_fill(~counted, 0)
        count = labels_C.shape[0]
        x_CE = nn.functional.pad(x_CE, (0, 0, 0, -count % TOKEN_MULTIPLE))
        entries = weight.shape[0] * x_CE.shape[0]
        if memory.numel() < entries:  # once: the first chunk is the largest
            memory = x.new_empty(entries)
        logits_VC = torch.mm(table_VE, x_CE.T, out=memory[:entries].view(-1, x_CE.shape[0]))
        if bias is not None:
            logits_VC += bias.to(logits_VC.dtype)[:, None]
        shares_VC, losses_C = _softmax_and_losses(logits_VC.to(loss.dtype), labels_C)
        loss += losses_C.sum() if counted is None else torch.where(counted, losses_C, 0).sum()
        if not with_gradients:
            continue
        dlogits_VC = shares_VC
        dlogits_VC[:, :count].scatter_add_(0, labels_C[None], shares_VC.new_full((1, count), -1))
        if counted is not None:
            dlogits_VC[:, :count] *= counted
        if bias is not None:
            dbias += dlogits_VC[:, :count].sum(1)
        dlogits_VC = dlogits_VC.to(x.dtype)
        dx[tokens] = (dlogits_VC.T @ table_VE)[:count]
        _add_product(dweight, dlogits_VC, x_CE)  # rows of padding are zero, so their gradients add nothing
    return loss, dx, dweight, dbias


def _softmax_and_losses(logits_VC: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the vocabulary, written over the logits, and the cross-entropy of each labelled token.

    ``log_softmax`` would take a second tensor of the size of the logits, and its exponential a pass more.
    """
    logits_VC -= logits_VC.amax(0)
    chosen_C = logits_VC.gather(0, labels_C[None])[0]
    sums_C = logits_VC.exp_().sum(0)
    logits_VC /= sums_C
    return logits_VC, sums_C[: labels_C.shape[0]].log() - chosen_C


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, without a product of its own where the dtypes are equal."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _results(
    x: Tensor, weight: Tensor, bias: Tensor | None, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Zeros, to which the operator adds what it returns; sums are at least float32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    loss = x.new_zeros((), dtype=exact)
    if not with_gradients:
        return loss, x.new_empty(0), loss.new_empty(0), loss.new_empty(0)
    return loss, torch.zeros_like(x), loss.new_zeros(weight.shape), loss.new_zeros(0 if bias is None else bias.shape)


@_head_cross_entropy.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    *,
    with_gradients: bool,
    fixed_shapes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(x, weight, bias, with_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    _, weight, bias, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
    # not saved through autograd, where a policy could round them; and detached, since they are outputs of this node
    ctx.gradients = [gradient.detach() for gradient in output[1:]]


@once_differentiable
def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None, None
    dx, dweight, dbias = ctx.gradients
    weight_dtype, bias_dtype = ctx.dtypes
    scaled_bias = None if bias_dtype is None else (dbias * grad).to(bias_dtype)
    return (dx * grad).to(dx.dtype), (dweight * grad).to(weight_dtype), scaled_bias, None, None


_head_cross_entropy.register_autograd(_backward, setup_context=_save)


_of_thread = threading.local()


@contextlib.contextmanager
def fixed_shapes() -> Iterator[None]:
    """Within, in this thread, all tokens are computed: a recording must not depend on how many have a label."""
    before, _of_thread.fixed = getattr(_of_thread, "fixed", False), True
    try:
        yield
    finally:
        _of_thread.fixed = before


def is_recorded(tensor: Tensor) -> bool:
    """Whether what is done with ``tensor`` will be done again with other values, so that no value may decide sizes."""
    return getattr(_of_thread, "fixed", False) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def has_values(tensor: Tensor) -> bool:
    """Whether ``tensor`` has entries: fake and meta tensors have a shape alone."""
    return not tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter)


def _tokens(labels: Tensor, ignore_index: int, chunk: int, fixed: bool) -> Iterator[tuple[Any, Tensor | None]]:
    """Places of the labelled tokens, a chunk at a time; where shapes are fixed, of all, and which of them count."""
    if fixed:
        for start in range(0, labels.shape[0], chunk):
            tokens = slice(start, start + chunk)
            yield tokens, labels[tokens] != ignore_index
        return
    for places in (labels != ignore_index).nonzero()[:, 0].split(chunk):
        if places.numel():
            yield places, None
