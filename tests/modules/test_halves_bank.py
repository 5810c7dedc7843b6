"""hf_comera/modules/halves_bank.py: halves of all layers are built together, kept while they hold, and never stale."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_comera.modules import TTLinear
from hf_comera.modules.halves_bank import core_copies
from hf_comera.ops.halves import Side
from tests.modules.bank_layers import layers, reference


class RawSGD(torch.optim.Optimizer):
    """Writes to memory behind torch's back, as optimizers with kernels of their own do."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.detach().numpy()[...] -= 0.1 * parameter.grad.numpy()


def scaled(layer):
    return {name: 1.5 * value for name, value in layer.state_dict().items()}


def set_data(layer):
    layer.core_1.data = 2 * layer.core_1.data


def slice_data(layer):
    """Fewer ranks at one bond, in the same memory."""
    layer.core_2.data = layer.core_2.data[..., :2]
    layer.core_3.data = layer.core_3.data[:2]


def transposed(layer):
    """A core that is not contiguous, then an edit that torch does not count."""
    layer.core_1 = nn.Parameter(layer.core_1.detach().transpose(0, 2).contiguous().transpose(0, 2))
    layer(torch.randn(2, 12, dtype=torch.float64))
    layer.core_1.data.mul_(1.5)


EDITS = {
    "sliced data": slice_data,
    "not contiguous": transposed,
    "in place": lambda layer: layer.core_1.detach().mul_(2),
    "through .data": lambda layer: layer.core_1.data.mul_(2),
    "last entry through .data": lambda layer: layer.core_1.data.view(-1)[-1:].add_(1),
    "other data": set_data,
    "load_state_dict": lambda layer: layer.load_state_dict(scaled(layer)),
    "load_cores": lambda layer: layer.load_cores([core.detach() + 0.1 for core in layer.cores()]),
    "other ranks": lambda layer: layer.load_cores(TTLinear(12, 12, ranks=3, dtype=torch.float64).cores()),
    "load_dense": lambda layer: layer.load_dense(torch.randn(12, 12, dtype=torch.float64)),
    "reset": lambda layer: layer.reset_parameters(),
    "rank gates": lambda layer: (layer.add_rank_gates(), layer.rank_gate_0.data.mul_(2)),
    "a new parameter": lambda layer: setattr(layer, "core_0", nn.Parameter(layer.core_0.detach() + 1)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("place", [0, 2])
def test_no_edit_leaves_stale_halves(edit, grad, place):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            stack(x)
        edit(stack[place])
        torch.testing.assert_close(stack(x), reference(stack, x))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "raw": RawSGD,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_training_equals_training_without_a_bank(make, set_to_none):
    ours = layers()
    plain = copy.deepcopy(ours)
    x = torch.randn(4, 12, dtype=torch.float64)
    results = []
    for stack, forward in ((ours, lambda: ours(x)), (plain, lambda: reference(plain, x))):
        optimizer = make(stack.parameters())
        for _ in range(3):
            for _ in range(2):  # accumulates
                forward().square().mean().backward()
            with torch.no_grad():
                forward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        results.append([parameter.detach().clone() for parameter in stack.parameters()])
    torch.testing.assert_close(*results)


def test_builds_over_the_life_of_a_training(builds):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    optimizer = torch.optim.SGD(stack.parameters(), 0.1)

    def built(run):
        builds.clear()
        run()
        return list(builds)

    def micro_step():
        stack(x).sum().backward()

    def evaluate():
        with torch.no_grad():
            stack(x)

    assert built(micro_step) == [3, 3], "left and right halves of three layers"
    assert built(micro_step) == [], "gradients accumulate"
    assert built(evaluate) == [], "halves with a gradient serve without one"
    optimizer.step()
    optimizer.zero_grad()
    assert built(micro_step) == [3, 3]
    optimizer.zero_grad()
    assert built(micro_step) == [3, 3], "nobody knows what happened to the cores when their gradients were dropped"
    stack.eval()
    assert built(evaluate) == [3, 3]
    assert built(evaluate) == []
    stack[1].core_0.detach().mul_(2)
    assert built(evaluate) == [1, 1], "only what changed"


@pytest.mark.parametrize("ranks", [(5, 5, 5), (1, 4, 12)], ids=["equal", "ragged"])
def test_gradients_accumulate_through_kept_halves(ranks):
    stack = layers(ranks)
    batches = torch.randn(3, 4, 12, dtype=torch.float64)
    for batch in batches:
        stack(batch).square().mean().backward()
    ours = [parameter.grad for parameter in stack.parameters()]
    total = sum(reference(stack, batch).square().mean() for batch in batches)
    torch.testing.assert_close(ours, list(torch.autograd.grad(total, list(stack.parameters()))))


def test_a_layer_that_is_not_called_gets_no_gradient():
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    stack[1](x).sum().backward()
    assert stack[1].core_0.grad is not None
    assert stack[0].core_0.grad is None
    assert stack[2].core_3.grad is None


def test_frozen_layers_train_no_core_and_are_built_once(builds):
    stack, x = layers().requires_grad_(False), torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    stack[2].requires_grad_(True)
    for _ in range(3):
        stack(x).sum().backward()
        stack.zero_grad()
    assert all(parameter.grad is None for parameter in stack[:2].parameters())
    torch.testing.assert_close(x.grad, 3 * torch.autograd.grad(reference(stack, x).sum(), x)[0])
    assert builds == [2, 1, 2, 1] + [1, 1] * 2


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda stack: pickle.loads(pickle.dumps(stack))], ids=["copy", "pickle"]
)
def test_copies_have_banks_of_their_own(again):
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    before = stack(x)
    copied = again(stack)
    assert copied[0].halves_bank is not stack[0].halves_bank
    assert copied[0].halves_bank is copied[2].halves_bank
    copied[0].core_0.detach().mul_(3)
    torch.testing.assert_close(copied(x), reference(copied, x))
    assert torch.equal(stack(x), before)


def test_each_layer_keeps_its_own_dtype_under_mixed_autocast(builds):
    stack, x = layers(dtype=torch.float32), torch.randn(4, 12)

    def mixed():
        with torch.autocast("cpu", torch.bfloat16):
            y = stack[1](stack[0](x))
        return stack[2](y.float())

    mixed().sum().backward()
    stack.zero_grad()
    builds.clear()
    mixed().sum().backward()
    assert sorted(builds) == [1, 1, 2, 2]
    assert {parameter.grad.dtype for parameter in stack.parameters()} == {torch.float32}


def test_cores_that_are_thawed_get_gradients_and_frozen_ones_none():
    stack, x = layers(), torch.randn(4, 12, dtype=torch.float64)
    stack[0].core_1.requires_grad_(False)
    stack(x)
    stack.requires_grad_(True)
    stack(x).sum().backward()
    assert stack[0].core_1.grad is not None
    stack.requires_grad_(False)
    assert not stack(x).requires_grad


def test_training_by_hand_through_data():
    stacks = [layers() for _ in range(2)]
    stacks[1].load_state_dict(stacks[0].state_dict())
    x = torch.randn(4, 12, dtype=torch.float64)
    for stack, forward in zip(stacks, (lambda: stacks[0](x), lambda: reference(stacks[1], x)), strict=True):
        for _ in range(3):
            forward().square().mean().backward()
            for parameter in stack.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad.zero_()
    torch.testing.assert_close(list(stacks[0].parameters()), list(stacks[1].parameters()))


@pytest.mark.parametrize("ranks", [(5, 5, 5), (5, 2, 9)], ids=["equal", "ragged"])
def test_how_much_copies_of_cores_take_is_known_beforehand(ranks, monkeypatch):
    stack, copies, stacked = layers(ranks), [], Side.stacked
    monkeypatch.setattr(Side, "stacked", lambda side: copies.append(stacked(side)[0]) or stacked(side))
    stack(torch.randn(2, 12, dtype=torch.float64))
    assert core_copies(stack) == sum(core.nbytes for cores in copies for core in cores) > 0
