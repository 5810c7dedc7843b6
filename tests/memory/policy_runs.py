"""A forward and a backward under a policy, with all they give; and the policies that they are compared under."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from hf_comera.memory import ActivationPolicy, SavedBytes, set_activation_policy

EXACT = {
    "scores": ActivationPolicy(min_bytes=0),
    "recompute": ActivationPolicy(min_bytes=0, attention="recompute"),
}
"""Policies whose gradients are those without a policy, to the last bit; of tensors of any size."""
RANK = EXACT["scores"]


class Run(NamedTuple):
    """What a forward and a backward gave."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    saved_bytes: int


class Of(nn.Module):
    """A module that computes ``function(module, x)`` with a few parameters."""

    def __init__(self, function: Callable[..., Tensor], features: int = 8) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(features, features), nn.Linear(features, features)
        self.norm = nn.LayerNorm(features)
        self.register_buffer("scale", torch.linspace(0.5, 2, features))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def scalar_of(output) -> Tensor:
    """A loss of what a model returns."""
    return (output if isinstance(output, Tensor) else output[0]).float().square().mean()


def run(model, inputs, policy, *, loss_of=scalar_of, autocast=False, set_policy=set_activation_policy) -> Run:
    """Forward and backward with the same random numbers each time; also the gradients of inputs that have one."""
    set_policy(model, policy)
    model.zero_grad()
    torch.manual_seed(3)
    for value in inputs.values():
        value.grad = None
    with SavedBytes(model.parameters()) as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model(**inputs))
    loss.backward()
    named = [*model.named_parameters(), *inputs.items()]
    gradients = {name: None if tensor.grad is None else tensor.grad.clone() for name, tensor in named}
    assert stacks() == (0, None)
    return Run(loss.detach(), gradients, saved.total)


def stacks() -> tuple[int, object]:
    """Torch function modes on the stack, and the topmost saved-tensor hooks."""
    return len(_get_current_function_mode_stack()), torch._C._autograd._top_saved_tensors_default_hooks(True)


def assert_same(found: Run, expected: Run) -> None:
    """Loss and gradients, to the last bit."""
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        if gradient is None:
            assert found.gradients[name] is None, name
        else:
            assert torch.equal(found.gradients[name], gradient), name


def error(found: Run, expected: Run) -> float:
    """The norm of the difference of all gradients, divided by that of the expected ones."""
    pairs = [
        (found.gradients[name], gradient) for name, gradient in expected.gradients.items() if gradient is not None
    ]
    difference = sum((left - right).double().square().sum() for left, right in pairs)
    return (difference / sum(right.double().square().sum() for _, right in pairs)).sqrt().item()
