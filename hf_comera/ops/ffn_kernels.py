"""Call of the CUDA kernel of a low-rank feed-forward block, forward only: its hidden features stay on the chip."""

# Shapes here: T = tokens (any leading axes), I, H, O = in, hidden and out features, R and S = ranks of the two layers.

from torch import Tensor

from hf_comera.ops.kernel_calls import current_stream, kernel_library, on_device, pointers
from hf_comera.ops.kernels import check_status
from hf_comera.ops.low_rank_kernels import ACTIVATIONS, kernel_precision, low_rank_linear_refusal
from hf_comera.ops.rank_activation import check_rank_activation

__all__ = ["FFN_ACTIVATIONS", "low_rank_ffn", "low_rank_ffn_refusal"]

FFN_ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}  # the numbers of kernels/activations.h
MAX_FFN_RANK = 64


def low_rank_ffn_refusal(
    x: Tensor, left_in: Tensor, right_in: Tensor, left_out: Tensor, right_out: Tensor
) -> str | None:
    """Why the kernel cannot take these tensors, or None where it can.

    Shape:
        As ``low_rank_ffn``.
    """
    if max(left_in.shape[0], left_out.shape[0]) > MAX_FFN_RANK:
        return f"the kernel takes ranks up to {MAX_FFN_RANK}, not {left_in.shape[0]} and {left_out.shape[0]}"
    hidden = x.new_empty(0, right_in.shape[1])
    return low_rank_linear_refusal(x, left_in, right_in) or low_rank_linear_refusal(hidden, left_out, right_out)


def low_rank_ffn(
    x: Tensor,
    left_in: Tensor,
    right_in: Tensor,
    left_out: Tensor,
    right_out: Tensor,
    activation: str,
    *,
    bias_in: Tensor | None = None,
    bias_out: Tensor | None = None,
    rank_activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two low-rank layers with an activation between them, in one launch.

    Args:
        x: Input.
        left_in, right_in, bias_in: Halves and bias of the layer to the hidden features.
        left_out, right_out, bias_out: Those of the layer from them.
        activation: ``"gelu"`` (exact), ``"gelu_tanh"``, ``"relu"`` or ``"silu"``.
        rank_activation: Between the halves of both layers.

    Shape:
        x ``(..., I)``, left_in ``(R, I)``, right_in ``(R, H)``, left_out ``(S, H)``, right_out ``(S, O)``:
        y ``(..., O)``, the codes ``(..., R)`` and ``(..., S)``, before the rank activation, all in the dtype of ``x``.

    Raises:
        ValueError: If ``activation`` is unknown or the kernel cannot take the tensors.
    """
    _check(x, [left_in, right_in, left_out, right_out], activation, rank_activation)
    halves = [half.contiguous() for half in (left_in, right_in, left_out, right_out)]
    biases = [None if bias is None else bias.to(x.dtype).contiguous() for bias in (bias_in, bias_out)]
    x = x.contiguous()
    hidden, out = right_in.shape[1], right_out.shape[1]
    ranks = (left_in.shape[0], left_out.shape[0])
    y, code_in, code_out = (x.new_empty(*x.shape[:-1], size) for size in (out, *ranks))
    tensors = pointers(x, *halves[:2], biases[0], *halves[2:], biases[1], y, code_in, code_out)
    sizes = (x.shape[:-1].numel(), x.shape[-1], hidden, out, *ranks)
    numbers = (FFN_ACTIVATIONS[activation], ACTIVATIONS[rank_activation])
    library = kernel_library(x.device)
    with on_device(x.device):
        status = library.hf_comera_low_rank_ffn(
            kernel_precision(x), *tensors, *sizes, *numbers, current_stream(x.device)
        )
    check_status(library, status, "low_rank_ffn")
    return y, code_in, code_out


def _check(x: Tensor, halves: list[Tensor], activation: str, rank_activation: str | None) -> None:
    check_rank_activation(rank_activation)
    if activation not in FFN_ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} has no kernel. Use one of {', '.join(map(repr, FFN_ACTIVATIONS))}."
        )
    if reason := low_rank_ffn_refusal(x, *halves):
        raise ValueError(f"low_rank_ffn has no kernel for this: {reason}.")
