"""``y = x W + bias`` with W held as tensor-train cores and never formed: through the rank space, in two thin products.

``W = left.T @ right``; ``code = x @ left.T`` has one number per rank and token, and ``y = code @ right``. Saved for
backward are x and the code; all else is of the size of the cores.

Source: CoMERA, arXiv:2405.14377, section on contraction paths: two-sided contraction.
"""

# Shapes here: I = in features, O = out features, R = rank of the code, T = tokens.

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from hf_comera.ops.halves import RANK_MULTIPLE, layer_halves
from hf_comera.ops.precision import autocast_input, without_autocast

__all__ = ["bias_as_rank", "from_code", "to_code", "tt_linear"]

# Entries of an output from which on a pass over it takes longer than the few small operations that spare one.
WORTH_A_RANK = 1 << 17


def tt_linear(
    x: Tensor,
    cores: list[Tensor],
    num_in: int,
    bias: Tensor | None = None,
    out_features: int | None = None,
) -> Tensor:
    """``x @ W + bias`` for ``W = left.T @ right`` in tensor-train form.

    Args:
        x: Input. Under autocast it is cast first, as ``torch.nn.functional.linear`` does.
        cores: ``(r_{k-1}, n_k, r_k)``; the product of the first ``num_in`` factors is at least ``x.shape[-1]``.
        num_in: How many cores carry input factors; at least 1, and fewer than ``len(cores)``.
        bias: ``(out_features,)`` or None.
        out_features: Output size where the output factors are padded; default is their product.

    Shape:
        ``(..., in_features) -> (..., out_features)``.

    Returns:
        ``y`` in the dtype of ``x`` (of autocast, where it is on).

    Raises:
        ValueError: If the input factors cannot cover the last axis of ``x``.

    Source:
        CoMERA, arXiv:2405.14377.
    """
    covered, all_columns = 1, 1
    for core in cores[:num_in]:
        covered *= core.shape[1]
    for core in cores[num_in:]:
        all_columns *= core.shape[1]
    if x.shape[-1] > covered:
        raise ValueError(
            f"x has {x.shape[-1]} features, but the {num_in} input cores cover {covered}. "
            f"Pass x with a last axis of at most {covered}."
        )
    x = autocast_input(x)
    with without_autocast(x):
        left, right = layer_halves(cores, num_in, x.shape[-1], all_columns if out_features is None else out_features)
    return from_code(to_code(x, left), right, bias)


def to_code(x: Tensor, left: Tensor) -> Tensor:
    """``x @ left.T``.

    Shape:
        ``x`` ``(..., I)``, ``left`` ``(R, I)`` -> ``(..., R)``, in the dtype of ``x`` (of autocast, where it is on).
    """
    x = autocast_input(x)
    with without_autocast(x):
        return linear(x, left.to(x.dtype))


def from_code(code: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``code @ right + bias``.

    Shape:
        ``code`` ``(..., R)``, ``right`` ``(R, O)``, ``bias`` ``(O,)`` -> ``(..., O)``, in the dtype of ``code``.
    """
    code_TR = code.reshape(-1, code.shape[-1])
    with without_autocast(code):
        if bias is None:
            y_TO = code_TR @ right.to(code.dtype)
        else:
            y_TO = torch.addmm(bias.to(code.dtype), code_TR, right.to(code.dtype))
    return y_TO.view(*code.shape[:-1], right.shape[-1])


def bias_as_rank(
    code: Tensor, right: Tensor, bias: Tensor | None, rank: int, *, always: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What :func:`from_code` is to be given, with the bias in a rank that padding left empty, if that is faster.

    The code gets a column of ones and ``right`` the bias as a row, so that one product does what otherwise takes a
    pass over all of the output in front of it, and its gradient another pass in backward. Padding is there anyway.

    Args:
        code: From :func:`to_code`.
        right: Half behind it; its rows from ``rank`` on are zeros, as are the columns of the code.
        bias: ``(out_features,)`` or None.
        rank: Middle rank of the layer without padding.
        always: Whether to do it in any case, with more padding if need be.

    Shape:
        ``code`` ``(..., R)``, ``right`` ``(R, O)`` -> the same, or R more by :data:`RANK_MULTIPLE` where there was
        none to spare.

    Returns:
        Code, right half and bias; as they were on a GPU, whose products add a bias for nothing, for small outputs,
        without a bias, and where no rank is to spare.
    """
    on_cpu, entries = code.device.type == "cpu", code.numel() // code.shape[-1] * right.shape[1]
    worth = on_cpu and rank < right.shape[0] and entries >= WORTH_A_RANK and not torch.compiler.is_compiling()
    if bias is None or not (worth or always):
        return code, right, bias
    if rank == right.shape[0]:
        code, right = pad(code, (0, RANK_MULTIPLE)), pad(right, (0, 0, 0, RANK_MULTIPLE))
    place = torch.tensor([rank], device=code.device)
    # filled and copied, not added: entries beside the bias and the column of ones must stay clear of an infinite bias
    return code.index_fill(-1, place, 1), right.index_copy(0, place, bias.to(right.dtype).unsqueeze(0)), None
