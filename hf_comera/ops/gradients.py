"""Gradients of a function of tensors some of which may be the same: each place gets its own, and no more."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["gradients_of"]


def gradients_of(
    compute: Callable[[list[Tensor | None]], Tensor],
    tensors: Sequence[Tensor | None],
    grad: Tensor,
    *,
    create_graph: bool,
) -> list[Tensor | None]:
    """Gradients of ``compute(tensors)`` for a gradient of its result.

    Args:
        compute: Differentiable; gets stand-ins of the tensors.
        tensors: May hold None, and one tensor more than once.
        grad: Gradient of the result.
        create_graph: Whether the gradients can be differentiated again.

    Returns:
        One a tensor; None where there is no tensor, or it asks for no gradient.
    """
    with torch.enable_grad():
        aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        result = compute(aliases)
    wanted = [alias for alias in aliases if alias is not None and alias.requires_grad]
    options = {"create_graph": create_graph, "allow_unused": True}
    found = iter(torch.autograd.grad(result, wanted, grad, **options) if wanted else ())
    return [next(found) if alias is not None and alias.requires_grad else None for alias in aliases]
