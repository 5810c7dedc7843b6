"""``x W + bias`` by the dense matrix that two halves multiply to, for ranks at which that is sooner.

``tt/planner.py`` says which. Plain torch, differentiated by autograd; saved for backward are input, halves and matrix.
"""

# Shapes here: I = in features, O = out features, R = middle rank.

from torch import Tensor
from torch.nn import functional

from hf_comera.ops.precision import autocast_input, without_autocast

__all__ = ["dense_linear"]


def dense_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (left.T @ right) + bias``; differentiable in all four.

    Args:
        x: Input. Under autocast it is cast first.
        left: ``(R, in_features)``; rounded to the dtype of ``x``, in which the matrix is multiplied.
        right: ``(R, out_features)``, likewise.
        bias: ``(out_features,)`` or None.

    Shape:
        ``(..., in_features) -> (..., out_features)``.
    """
    x = autocast_input(x)
    with without_autocast(x):
        weight_OI = right.to(x.dtype).T @ left.to(x.dtype)
        return functional.linear(x, weight_OI, None if bias is None else bias.to(x.dtype))
