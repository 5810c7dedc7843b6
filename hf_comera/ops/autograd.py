"""Gradients where an operator has to ask for them itself, and where a transform does."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["gradients_of", "is_transformed"]


def gradients_of(
    compute: Callable[[list[Tensor | None]], Tensor],
    tensors: Sequence[Tensor | None],
    grad: Tensor,
    *,
    create_graph: bool,
) -> list[Tensor | None]:
    """Gradients of ``compute(tensors)`` for a gradient of its result; of one tensor in two places, one a place.

    Args:
        compute: Differentiable; gets aliases of the tensors.
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


def is_transformed() -> bool:
    """Whether forward-mode derivatives or a transform of ``torch.func`` follow plain functions."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or bool(torch._C._are_functorch_transforms_active())
