"""hf_comera/modules/halves_cache.py beside torch's other machinery: checkpoints, transforms, modes, traces, graphs."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_comera.modules import TTLinear, halves_cache
from hf_comera.modules.halves_cache import drop_cached_halves, note_parameter_edit
from tests.modules.cached_layers import layers, reference


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_gives_the_same_gradients(use_reentrant):
    stack = layers((5, 5, 5, 5))
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        stack.zero_grad()
        x.grad = None
        first = checkpoint(stack[:2], x, use_reentrant=use_reentrant)
        checkpoint(stack[2:], first, use_reentrant=use_reentrant).square().sum().backward()
        expected = torch.autograd.grad(reference(stack, x).square().sum(), [x, *stack.parameters()])
        torch.testing.assert_close([x.grad, *(parameter.grad for parameter in stack.parameters())], list(expected))


def test_functional_calls_and_transforms_go_past_the_cache():
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    before = stack(x)
    other = {name: 2 * value.detach() for name, value in stack.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(stack, parameters, (x,)).square().sum()

    changed = copy.deepcopy(stack)
    changed.load_state_dict(other)
    torch.testing.assert_close(loss(other), changed(x).square().sum())
    found = torch.func.grad(loss)(other)
    expected = torch.autograd.grad(changed(x).square().sum(), list(changed.parameters()))
    torch.testing.assert_close(list(found.values()), list(expected))
    torch.testing.assert_close(torch.vmap(stack)(x[:, None])[:, 0], before)
    assert torch.equal(stack(x), before)


def test_inference_mode():
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    with torch.inference_mode():
        inside = stack(x)
        made_inside = TTLinear(12, 12, ranks=2, dtype=torch.float64)
        made_inside(x)
    stack(x).sum().backward()
    torch.testing.assert_close(inside.clone(), reference(stack, x))


def test_second_derivatives():
    stack, x = layers((3, 3)), torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    stack(x)
    parameters = [x, stack[0].core_0, stack[1].core_2]

    def penalty(y):
        return sum(
            grad.square().sum() for grad in torch.autograd.grad(y.square().sum(), parameters, create_graph=True)
        )

    ours = torch.autograd.grad(penalty(stack(x)), parameters)
    torch.testing.assert_close(ours, torch.autograd.grad(penalty(reference(stack, x)), parameters))


def test_halves_made_in_inference_mode_are_not_used_for_training():
    stack, x = layers().requires_grad_(False), torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        stack(x)
    stack(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(reference(stack, x).sum(), x)[0])


def test_second_derivatives_beside_frozen_cores():
    stack, x = layers((3, 3)), torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    stack[0].core_1.requires_grad_(False)
    (first,) = torch.autograd.grad(stack(x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(reference(stack, x).square().sum(), x, create_graph=True)
    tensors = [x, stack[0].core_0]
    torch.testing.assert_close(
        torch.autograd.grad(first.square().sum(), tensors), torch.autograd.grad(expected.square().sum(), tensors)
    )


def test_reentrant_checkpointing_builds_each_layer_once_in_backward(builds):
    stack = layers((5,) * 8)
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    y = x
    for layer in stack:
        y = checkpoint(layer, y, use_reentrant=True)
    builds.clear()
    y.sum().backward()
    assert builds == [1] * 16


def test_memory_of_cores_can_still_be_resized():
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    stack(x)
    core = stack[0].core_0
    values, storage = core.detach().clone(), core.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(num_bytes)
    core.detach().copy_(values)
    torch.testing.assert_close(stack(x), reference(stack, x))


def test_a_traced_layer_takes_in_other_cores():
    layer = TTLinear(12, 12, ranks=3).eval()
    x = torch.randn(4, 12)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer(x)
        traced = torch.jit.trace(layer, x)
        other = TTLinear(12, 12, ranks=3)
        traced.load_state_dict(other.state_dict())
        torch.testing.assert_close(traced(x), other(x))


def test_one_entry_written_behind_torchs_back_is_seen(builds):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    stack(x)
    stack[1].core_1.detach().numpy()[0, 1, 1] += 1
    torch.testing.assert_close(stack(x), reference(stack, x))
    assert builds == [3, 3, 1, 1]


def test_what_writes_to_parameters_can_say_so(builds):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    stack(x)
    note_parameter_edit()
    stack(x)
    assert builds == [3, 3] * 2


def test_dropped_halves_are_free_with_their_graph():
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    stack(x)
    half = weakref.ref(stack.get_submodule("0").halves_cache.halves(stack[0], torch.float64)[0])
    drop_cached_halves()
    gc.collect()
    assert half() is None
    torch.testing.assert_close(stack(x), reference(stack, x))


def test_every_capture_builds_its_own_halves_and_nobody_else_uses_them(builds, monkeypatch):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    capturing = False
    monkeypatch.setattr(halves_cache, "_capturing", lambda core: capturing)
    seen = []
    for capturing in (False, True, True, False):
        if capturing:
            drop_cached_halves()
        builds.clear()
        with torch.no_grad():
            stack(x), stack(x)
        seen.append(list(builds))
        if capturing:
            drop_cached_halves()
    assert seen == [[3, 3]] * 4
