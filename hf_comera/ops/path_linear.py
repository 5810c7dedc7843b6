"""``y = x W + bias`` along any contraction path: what a layer runs where the two-sided operator is not the soonest.

Plain torch, differentiated by autograd. Saved for backward are the input, the parts of the path and, off the dense
path, the code, which for a cut beside the middle bond is several times wider than a rank.
"""

# Shapes here: I = in features, O = out features, R = middle rank.

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from hf_comera.ops.precision import autocast_input, chain_dtype, without_autocast
from hf_comera.tt.contraction import apply_parts, build_parts
from hf_comera.tt.path import ContractionPath

__all__ = ["dense_linear", "path_linear"]


def path_linear(x: Tensor, cores: Sequence[Tensor], path: ContractionPath, bias: Tensor | None = None) -> Tensor:
    """``x @ W + bias`` for a tensor train W along ``path``; differentiable in ``x``, ``cores`` and ``bias``.

    Args:
        x: Input. Under autocast it is cast first, as ``torch.nn.functional.linear`` does; cores are contracted in
            float32 at least, and their products rounded once.
        cores: ``(r_{k-1}, n_k, r_k)``.
        path: Planned for the factors and sizes of the layer.
        bias: ``(out_features,)`` or None.

    Shape:
        ``(..., in_features) -> (..., out_features)``.

    Raises:
        ValueError: If ``x`` or ``cores`` are not what ``path`` was planned for.
    """
    found, factors = [core.shape[1] for core in cores], [*path.problem.in_factors, *path.problem.out_factors]
    if x.shape[-1] != path.problem.in_features or found != factors:
        raise ValueError(
            f"x with {x.shape[-1]} features and cores of factors {found} do not fit a path for "
            f"{path.problem.in_features} features and factors {factors}. Plan one with plan_path for this layer."
        )
    x = autocast_input(x)
    with without_autocast(x):
        parts = build_parts([core.to(chain_dtype(core)) for core in cores], path, x.dtype)
        y = apply_parts(x, parts, path)
        return y if bias is None else y + bias.to(y.dtype)


def dense_linear(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (left.T @ right) + bias``: the dense path from halves that are at hand; differentiable in all four.

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
