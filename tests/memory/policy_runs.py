"""A forward and a backward under a policy, with all they give; and the models and policies that are compared."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.memory import ActivationPolicy, SavedBytes, set_activation_policy
from hf_comera.modules.halves_cache import note_parameter_edit

EXACT = {"rank": ActivationPolicy(), "recompute": ActivationPolicy(attention="recompute")}
"""Policies whose gradients are those without a policy, to the last bit."""
ROUNDED = {
    "rank+fp8": ActivationPolicy(attention="recompute", storage="fp8", min_bytes=0),
    "rank+fp8, attention kept": ActivationPolicy(storage="fp8", min_bytes=0),
    "fp8": ActivationPolicy(recompute=False, storage="fp8", min_bytes=0),
}
"""Policies that round what they keep; of tensors of any size."""

RATES = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "embd_pdrop"),
    *("dropout", "attention_dropout", "activation_dropout", "dropout_rate"),
)


class Run(NamedTuple):
    """What a forward and a backward gave."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    saved_bytes: int


def model_of(architecture, is_compressed, dropout, attention="sdpa", **settings):
    """A model in training mode whose dropout has this rate everywhere."""
    config = architecture.new_config()
    config.update({rate: dropout for rate in RATES if hasattr(config, rate)})
    config.update({"use_cache": False} | settings)  # layers with a policy take no cache
    config._attn_implementation = attention
    if is_compressed:
        return get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=config).train()
    return architecture.auto_class.from_config(config).train()


def run(model, inputs, policy, *, autocast=False, set_policy=set_activation_policy) -> Run:
    """Forward and backward with the same random numbers each time; also the gradients of inputs that have one."""
    set_policy(model, policy)
    model.zero_grad()
    note_parameter_edit()  # halves are built anew
    torch.manual_seed(3)
    for value in inputs.values():
        value.grad = None
    with SavedBytes(model.parameters()) as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**inputs).loss
    loss.backward()
    named = [*model.named_parameters(), *inputs.items()]
    gradients = {name: None if tensor.grad is None else tensor.grad.clone() for name, tensor in named}
    assert_nothing_left()
    return Run(loss.detach(), gradients, saved.total)


def draw_as_a_gpu(monkeypatch):
    """Dropout draws into a fresh tensor, as on a GPU; on a CPU torch's writes its numbers into one."""

    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, True)[0] if training and p else x

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)


def assert_nothing_left():
    """No modes, no saved-tensor hooks, autocast as it was."""
    assert not _get_current_function_mode_stack()
    assert not _get_current_dispatch_mode_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.is_autocast_cache_enabled()


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
