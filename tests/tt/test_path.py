"""hf_comera/tt/path.py and contraction.py: every path computes x W, costs what is said, and the soonest is planned."""

import functools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_comera.tt.contraction import apply_parts, build_parts, contract
from hf_comera.tt.cores import core_shapes
from hf_comera.tt.machine import CPU_THREAD, H200, Ceilings, Machine
from hf_comera.tt.path import candidate_paths, plan_path

# in_factors, out_factors, ranks, in_features, out_features
LAYERS = [
    ((6,), (5,), (3,), 6, 5),
    ((6,), (5,), (1,), 6, 4),
    ((2, 3), (4, 2), (2, 3, 2), 6, 8),
    ((2, 3), (4, 2), (1, 1, 1), 5, 7),
    ((3, 3), (2, 5), (3, 9, 5), 7, 9),  # full ranks and padding on both sides
    ((4,), (2, 3, 2), (4, 3, 2), 4, 12),
    ((2, 3, 2), (7,), (2, 5, 4), 11, 7),
    ((2, 1, 3), (3, 1), (2, 2, 3, 3), 6, 3),  # factors of one
    ((3, 2, 2), (2, 2, 3), (3, 5, 1, 4, 3), 12, 11),  # a middle rank of one
    ((2, 2, 2, 2), (3, 2, 2, 2), (2, 3, 4, 5, 4, 3, 2), 15, 23),
]
every_layer = pytest.mark.parametrize(("in_factors", "out_factors", "ranks", "in_features", "out_features"), LAYERS)


def random_cores(in_factors, out_factors, ranks):
    shapes = core_shapes((*in_factors, *out_factors), ranks)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense_matrix(cores, num_in, in_features, out_features):
    """The oracle: one contraction over all ranks at once, by einsum."""
    letters = "abcdefgh"[: len(cores)]
    ranks = "stuvwxyzA"[: len(cores) + 1]
    terms = ",".join(ranks[k] + letters[k] + ranks[k + 1] for k in range(len(cores)))
    tensor = torch.einsum(f"{terms}->{letters}", *cores)
    return tensor.reshape(math.prod(tensor.shape[:num_in]), -1)[:in_features, :out_features]


def all_paths(in_factors, out_factors, ranks, rows=5, **settings):
    settings = {"training": True, "halves_cached": False, "machine": CPU_THREAD, "dtype": torch.float64} | settings
    return candidate_paths(plan_path(in_factors, out_factors, ranks, rows, **settings).problem)


@every_layer
@pytest.mark.parametrize("lead", [(4,), (), (0,), (2, 1, 3)], ids=str)
def test_every_path_computes_the_same(in_factors, out_factors, ranks, in_features, out_features, lead):
    cores = random_cores(in_factors, out_factors, ranks)
    x = torch.randn(*lead, in_features, dtype=torch.float64, requires_grad=True)
    expected = x @ dense_matrix(cores, len(in_factors), in_features, out_features)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, [x, *cores], grad)
    paths = all_paths(in_factors, out_factors, ranks, in_features=in_features, out_features=out_features)
    assert len(paths) == len(cores)  # a cut at each inner bond, and dense
    assert {path.kind for path in paths} >= {"two-sided", "dense"}
    for path in paths:
        y = contract(x, cores, path)
        torch.testing.assert_close(y, expected, msg=path.label)
        torch.testing.assert_close(torch.autograd.grad(y, [x, *cores], grad), expected_grads, msg=path.label)


@every_layer
@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward-backward"])
def test_multiplications_are_those_that_torch_carries_out(
    in_factors, out_factors, ranks, in_features, out_features, training
):
    cores = random_cores(in_factors, out_factors, ranks)
    x = torch.randn(5, in_features, dtype=torch.float64, requires_grad=True)
    sizes = {"in_features": in_features, "out_features": out_features}
    for path in all_paths(in_factors, out_factors, ranks, training=training, **sizes):
        with FlopCounterMode(display=False) as counter:
            y = contract(x, cores, path)
            if training:
                y.sum().backward()
        assert 2 * path.cost().multiplications == counter.get_total_flops(), path.label


def test_a_cache_saves_what_does_not_need_the_input():
    in_factors, out_factors, ranks = (4, 6), (6, 4), (4, 8, 4)
    cores = random_cores(in_factors, out_factors, ranks)
    for path in all_paths(in_factors, out_factors, ranks, training=False, halves_cached=True):
        parts = build_parts(cores, path)
        with FlopCounterMode(display=False) as counter:
            apply_parts(torch.randn(5, 24, dtype=torch.float64), parts, path)
        assert 2 * path.cost().multiplications == counter.get_total_flops(), path.label
        assert path.cost(halves_cached=False).multiplications > path.cost().multiplications


def test_in_training_a_cache_holds_halves_only():
    for path in all_paths((4, 6), (6, 4), (4, 8, 4), halves_cached=True):
        stages = {product.stage for product in path.products()}
        assert stages == {"two-sided": {"apply"}, "dense": {"matrix", "apply"}, "split": {"parts", "apply"}}[path.kind]


def test_bytes_count_each_operand_and_each_result_once():
    (two_sided,) = (path for path in all_paths((6,), (5,), (3,), rows=7, training=False) if path.kind == "two-sided")
    read, written = 7 * 6 + 6 * 3 + 7 * 3 + 3 * 5, 7 * 3 + 7 * 5
    assert two_sided.cost() == (7 * 6 * 3 + 7 * 3 * 5, 8 * read, 8 * written)
    backward = (7 * 3 + 3 * 6 + 7 * 6) + (6 * 7 + 7 * 3 + 6 * 3) + (7 * 5 + 5 * 3 + 7 * 3) + (3 * 7 + 7 * 5 + 3 * 5)
    assert two_sided.cost(training=True).bytes == 8 * (read + written + backward)


@pytest.mark.parametrize(("in_factors", "out_factors", "ranks"), [layer[:3] for layer in LAYERS])
def test_cores_are_multiplied_in_the_cheapest_of_all_orders(in_factors, out_factors, ranks):
    only_flops = Machine("flops", "a test", (Ceilings(torch.float64, 1.0, math.inf),))
    factors, bonds = (*in_factors, *out_factors), (1, *ranks, 1)

    @functools.cache
    def every_cost(first, last):  # exhaustive: of all ways to put brackets
        if first == last:
            return [0]
        return [
            left + right + bonds[first] * math.prod(factors[first : last + 1]) * bonds[last + 1] * bonds[middle]
            for middle in range(first + 1, last + 1)
            for left in every_cost(first, middle - 1)
            for right in every_cost(middle, last)
        ]

    for path in all_paths(in_factors, out_factors, ranks, training=False, machine=only_flops):
        parts = sum(product.m * product.k * product.n for product in path.forward if product.stage == "parts")
        assert parts == min(every_cost(0, path.bond - 1)) + min(every_cost(path.bond, len(factors) - 1)), path.label


@pytest.mark.parametrize("machine", [CPU_THREAD, H200], ids=lambda machine: machine.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_low_ranks_go_two_sided_and_full_ranks_dense(machine, dtype, training):
    settings = {"training": training, "halves_cached": not training, "machine": machine, "dtype": dtype}
    factors = (12, 8, 8), (8, 8, 12)
    low = plan_path(*factors, (12, 30, 30, 30, 12), 4096, **settings)
    assert (low.kind, low.label) == ("two-sided", "two-sided")
    assert plan_path(*factors, (12, 96, 768, 96, 12), 4096, **settings).kind == "dense"


def test_a_narrow_bond_beside_the_middle_is_where_to_cut():
    path = plan_path((64, 8), (64, 8), (1, 60, 60), 4096, training=False, halves_cached=True, machine=H200)
    assert (path.kind, path.bond, path.label) == ("split", 1, "split at bond 1")


def test_plans_are_made_once_and_are_the_first_of_the_candidates():
    arguments = ([12, 8, 8], (8, 8, 12), [12, 30, 30, 30, 12], 512)
    settings = {"training": True, "halves_cached": False, "machine": CPU_THREAD}
    path = plan_path(*arguments, **settings)
    assert path is plan_path(*arguments, **settings) is candidate_paths(path.problem)[0]
    assert path is not plan_path(*arguments[:3], 513, **settings)
    candidate_paths.cache_clear()
    assert path == plan_path(*arguments, **settings)
    assert [seconds for _, seconds in path.candidates] == sorted(seconds for _, seconds in path.candidates)
    assert path.candidates[0] == (path.label, path.seconds)


def test_it_prints_products_and_candidates():
    settings = {"training": True, "halves_cached": False, "machine": H200, "dtype": torch.bfloat16}
    path = plan_path((2, 3), (4, 2), (2, 3, 2), 10, in_features=5, **settings)
    lines = str(path).splitlines()
    assert lines[0] == "two-sided: (10, 5) -> (10, 8), forward and backward, halves built from the cores, bfloat16"
    assert max(map(len, lines)) <= 119
    words = [line.split() for line in lines]
    assert ["code", "10", "5", "3", "150", "190"] == next(line for line in words if line[0] == "code")
    assert ["together", f"{path.cost().multiplications:,}", f"{path.cost().bytes:,}"] in words
    assert "predicted for H200 (published or assumed, not measured here):" in str(path)
    assert {label for label, _ in path.candidates} == {"two-sided", "dense", "split at bond 1", "split at bond 3"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 3), (4,), (2,), 5), r"ranks=\(2,\) has 1 entries, but the cores have 2 inner bonds"),
        (((2, 3), (4,), (2, 0), 5), "ranks=0 is not a positive integer"),
        (((), (4,), (), 5), r"in_factors=\(\), out_factors=\(4,\): both sides need at least one"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_path(*arguments, training=False, halves_cached=True, machine=CPU_THREAD)
