"""hf_comera/ops/halves.py: by kernels, halves and gradients of all sides are those of stacked products."""

import pytest
import torch
from torch import nn

from hf_comera.ops import use_kernels
from hf_comera.ops.halves import Side, model_halves
from tests.dense_references import random_cores

# factors of the input and of the output, features, ranks of the layers
FAMILIES = {
    "two-factors": ((4, 6), (6, 4), (24, 24), (3, 9, 1)),
    "four-against-one": ((2, 3, 1, 2), (7,), (12, 7), (5,)),
    "padded": ((3, 3, 2), (3, 4), (17, 11), (8, 2)),
}
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def halves_of_launches(calls):
    """How many halves each launch made."""
    return [arguments[1] for name, arguments in calls if name == "tt_halves"]


def make_sides(device, families=FAMILIES, stored=torch.float32, dtype=torch.float32, gated=False):
    """Both sides of every family."""
    sides = []
    for in_factors, out_factors, sizes, ranks in (FAMILIES[name] for name in families):
        trains = [random_cores(in_factors, out_factors, rank, torch.float32) for rank in ranks]
        trains = [[nn.Parameter(core.detach().to(device, stored)) for core in cores] for cores in trains]
        gates = [[nn.Parameter(torch.rand(core.shape[-1], device=device)) for core in cores[:-1]] for cores in trains]
        gates = gates if gated else [[] for _ in trains]
        for on_left, size in zip((True, False), sizes, strict=True):
            part = slice(len(in_factors)) if on_left else slice(len(in_factors), None)
            cut = [[some[part] for some in each] for each in (trains, gates)]
            sides.append(Side(*cut, on_left, size, dtype))
    return sides


def with_and_without(compute):
    """What ``compute()`` gives by kernels and by torch."""
    found = compute()
    use_kernels(False)
    return found, compute()


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("stored", TOLERANCE, ids=str)
def test_equal_those_of_torch(stored, dtype, gated, served, calls):
    sides = make_sides(served, stored=stored, dtype=dtype, gated=gated)
    tensors = [tensor for side in sides for tensor in side.tensors()]
    torch.manual_seed(1)
    grads = [torch.randn(rank, side.features, device=served).to(dtype) for side in sides for rank in side.ranks()]

    def compute():
        halves = [half for each in model_halves(sides) for half in each]
        return halves, torch.autograd.grad(halves, tensors, grads)

    (halves, found), (expected, plain) = with_and_without(compute)
    assert halves_of_launches(calls) == [12], "one launch for both sides of all layers"
    torch.testing.assert_close(halves, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(found, plain, **TOLERANCE[stored])
    assert all(half.grad_fn.has_met_backward for half in halves)


def test_halves_that_nobody_used_leave_their_cores_without_gradient(served):
    sides = make_sides(served)
    halves = model_halves(sides)
    halves[1][2].sum().backward()
    has_gradient = {core.grad is not None for core in sides[1].cores[2]}
    others = [core for side in sides for cores in side.cores for core in cores if cores is not sides[1].cores[2]]
    assert has_gradient == {True}
    assert all(core.grad is None for core in others)


def test_second_derivatives_are_those_of_torch(served):
    sides = make_sides(served, ["four-against-one"], gated=True)
    tensors = [tensor for side in sides for tensor in side.tensors()]

    def compute():
        loss = sum(half.pow(3).sum() for each in model_halves(sides) for half in each)
        norm = sum(grad.square().sum() for grad in torch.autograd.grad(loss, tensors, create_graph=True))
        return torch.autograd.grad(norm, tensors)

    torch.testing.assert_close(*with_and_without(compute), rtol=1e-4, atol=1e-3)


def test_a_gradient_can_be_asked_for_again_and_results_are_no_shared_memory(served):
    sides = make_sides(served, gated=True)
    tensors = sides[0].tensors()
    first, again = model_halves(sides)[0], model_halves(sides)[0]
    kept = [half.detach().clone() for half in first]
    with torch.no_grad():
        tensors[0].data.mul_(2)  # torch does not count this
        model_halves(sides)
    assert all(torch.equal(half, same) for half, same in zip(first, kept, strict=True))
    results = [torch.autograd.grad([half.sum() for half in halves], tensors) for halves in (first, first, again)]
    for other in results[1:]:
        assert all(torch.equal(one, same) for one, same in zip(results[0], other, strict=True))


def test_cores_that_changed_before_backward_are_an_error_and_new_memory_is_none(served):
    sides = make_sides(served, ["two-factors"])
    core = sides[0].cores[0][0]
    (half, *_), _ = model_halves(sides)
    expected = torch.autograd.grad(half.sum(), core, retain_graph=True)[0]
    core.data = core.data.clone().fill_(100)
    assert torch.equal(torch.autograd.grad(half.sum(), core)[0], expected), "the memory of forward is held"
    (half, *_), _ = model_halves(sides)
    core.detach().mul_(2)
    with pytest.raises(RuntimeError, match=r"\(1, 4, 3\) was modified in place .* version 1, expected version 0"):
        half.sum().backward()


@pytest.mark.parametrize("create_graph", [False, True])
def test_only_layers_whose_gradient_is_wanted_must_be_unchanged(served, create_graph):
    sides = make_sides(served, ["two-factors"])
    first, second = (sides[0].cores[index] for index in (0, 1))
    halves = model_halves(sides)[0]
    with torch.no_grad():
        second[0].mul_(2)
    torch.autograd.grad(halves[0].sum(), first, create_graph=create_graph, retain_graph=True)
    with pytest.raises(RuntimeError, match="was modified in place"):
        torch.autograd.grad(halves[1].sum(), second, create_graph=create_graph)


def test_no_gradient_is_needed(served):
    sides = make_sides(served, ["two-factors"])
    transposed(sides)  # the copy that is read instead counts no versions in inference mode
    with torch.inference_mode():
        found, expected = with_and_without(lambda: model_halves(sides))
    torch.testing.assert_close(found, expected)
    assert not found[0][0].requires_grad


def transposed(sides):
    core = sides[0].cores[0][1]
    sides[0].cores[0][1] = nn.Parameter(core.detach().mT.contiguous().mT)


def in_float64(sides):
    for side in sides[:2]:
        side.cores = [[nn.Parameter(core.detach().double()) for core in cores] for cores in side.cores]
        side.dtype = torch.float64


def with_nine_cores(sides):
    ones = [nn.Parameter(torch.ones(1, 1, 1, device=sides[0].cores[0][0].device)) for _ in range(7)]
    sides[0].cores = [[*ones, *cores] for cores in sides[0].cores]


def frozen(sides):
    for tensor in (*sides[0].tensors(), *sides[1].tensors()):
        tensor.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [(transposed, [8]), (in_float64, [2]), (with_nine_cores, []), (frozen, [6, 2])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_kernel_cannot_take_goes_the_other_way(change, expected, served, calls):
    sides = make_sides(served, ["two-factors", "padded"])[:3]  # of three, three and two layers
    change(sides)
    tensors = [tensor for side in sides for tensor in side.tensors() if tensor.requires_grad]

    def compute():
        halves = [half for each in model_halves(sides) for half in each]
        used = [half.square().sum() for half in halves if half.requires_grad]
        return halves, torch.autograd.grad(used, tensors)

    found, plain = with_and_without(compute)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    assert halves_of_launches(calls) == expected
