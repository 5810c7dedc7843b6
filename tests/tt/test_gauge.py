"""hf_comera/tt/gauge.py: Gram matrices lead to the orthogonal gauge, where steps are steps of the matrix."""

import itertools

import pytest
import torch

from hf_comera.tt.gauge import interface_factors, interface_norms, remove_gauge, to_core, to_orthogonal_gauge
from hf_comera.tt.padding import RaggedStacks
from tests.dense_references import multiply_out, random_cores

TRAINS = [((4, 3), (2, 5), 3), ((5,), (4,), 2), ((2, 3, 4), (3, 4, 2), 4), ((6, 5), (7,), 4), ((1, 3), (2, 2), 1)]
trains = pytest.mark.parametrize(("in_factors", "out_factors", "rank"), TRAINS)


def interfaces(cores, place):
    """The products of the cores before and behind one core: ``(rows, r_{k-1})`` and ``(r_k, columns)``."""
    before, behind = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for core in cores[:place]:
        before = torch.tensordot(before, core, 1).reshape(-1, core.shape[-1])
    for core in reversed(cores[place + 1 :]):
        behind = torch.tensordot(core, behind, 1).reshape(core.shape[0], -1)
    return before, behind


def moved(cores, place, step):
    """What ``step`` on one core adds to the implied tensor."""
    return multiply_out([*cores[:place], step, *cores[place + 1 :]]).detach()


@trains
def test_factors_and_norms_are_those_of_the_interfaces(in_factors, out_factors, rank):
    cores = [core.detach() for core in random_cores(in_factors, out_factors, rank)]
    left, right = interface_factors(cores)
    for place, norm in enumerate(interface_norms(cores)):
        before, behind = interfaces(cores, place)
        torch.testing.assert_close(
            left[place].lower @ left[place].lower.T, before.T @ before, rtol=5e-3, atol=5e-3 * norm
        )
        torch.testing.assert_close(
            right[place].lower @ right[place].lower.T, behind @ behind.T, rtol=5e-3, atol=5e-3 * norm
        )
        expected = torch.linalg.matrix_norm(before, 2) * torch.linalg.matrix_norm(behind, 2)
        assert norm == pytest.approx(expected.item(), rel=1e-9)


@trains
def test_a_step_in_the_gauge_is_an_equal_step_of_the_matrix(in_factors, out_factors, rank, monkeypatch):
    monkeypatch.setattr("hf_comera.tt.gauge.DAMPING", 0.0)
    cores = random_cores(in_factors, out_factors, rank)
    direction = torch.randn(*in_factors, *out_factors, dtype=torch.float64)
    gradients = torch.autograd.grad((multiply_out(cores) * direction).sum(), cores)
    left, right = interface_factors(cores)
    for place, gradient in enumerate(gradients):
        in_gauge = to_orthogonal_gauge(gradient, left[place], right[place])
        step = to_core(in_gauge, left[place], right[place])
        change = moved(cores, place, step)
        assert change.norm().item() == pytest.approx(in_gauge.norm().item(), rel=1e-6)
        # the change is the orthogonal projection of the direction on what this core can do to the matrix
        assert (change * direction).sum().item() == pytest.approx(change.square().sum().item(), rel=1e-6)


@trains
@pytest.mark.parametrize("left_of_middle", [False, True])
def test_without_the_gauge_the_steps_of_all_cores_are_orthogonal(
    in_factors, out_factors, rank, left_of_middle, monkeypatch
):
    monkeypatch.setattr("hf_comera.tt.gauge.DAMPING", 0.0)
    cores = [core.detach() for core in random_cores(in_factors, out_factors, rank)]
    centre, changes = len(in_factors) - left_of_middle, []
    left, right = interface_factors(cores)
    for place, core in enumerate(cores):
        gradient = to_orthogonal_gauge(torch.randn_like(core), left[place], right[place])
        if place < centre:
            gradient = remove_gauge(gradient, core, left[place], on_left=True)
        elif place > centre:
            gradient = remove_gauge(gradient, core, right[place], on_left=False)
        changes.append(moved(cores, place, to_core(gradient, left[place], right[place])).flatten())
    overlap = torch.stack(changes) @ torch.stack(changes).T
    assert (overlap - overlap.diag().diag()).abs().max() < 1e-6 * (1 + overlap.diagonal().max())


def test_stacks_are_many_trains_at_once():
    trains = [[core.detach() for core in random_cores((4, 3), (2, 5), 3)] for _ in range(3)]
    left, right = interface_factors([torch.stack(cores) for cores in zip(*trains, strict=True)])
    for index, cores in enumerate(trains):
        for together, alone in zip(left + right, [*itertools.chain(*interface_factors(cores))], strict=True):
            torch.testing.assert_close(together.lower[index], alone.lower)
            torch.testing.assert_close(together.inverse[index], alone.inverse)


def test_padded_trains_are_stepped_as_they_would_be_alone():
    trains = [[core.detach() for core in random_cores((4, 3), (2, 5), rank)] for rank in (1, 2, 4)]
    ragged = RaggedStacks([[core.shape for core in cores] for cores in zip(*trains, strict=True)])
    ranks = [[cores[place].shape[0] for cores in trains] for place in range(4)]
    live = [torch.arange(max(of_bond)) < torch.tensor(of_bond).unsqueeze(1) for of_bond in [*ranks, [1, 1, 1]]]

    def moved(cores, live):
        left, right = interface_factors(cores, live)
        steps = []
        for place, core in enumerate(cores):
            on_left, bond = place < 2, place + 1 if place < 2 else place
            step = to_orthogonal_gauge(core.flip(-2), left[place], right[place])
            outer = left[place] if on_left else right[place]
            step = remove_gauge(step, core, outer, on_left=on_left, live=None if live is None else live[bond])
            steps.append(to_core(step, left[place], right[place]))
        return steps

    together = moved(ragged.pack([list(cores) for cores in zip(*trains, strict=True)]), live)
    alone = [moved(cores, None) for cores in trains]
    for padded, expected in zip(
        together, ragged.pack([list(steps) for steps in zip(*alone, strict=True)]), strict=True
    ):
        torch.testing.assert_close(padded, expected)
        assert torch.equal(padded == 0, expected == 0)  # padding is exactly zero


def test_an_interface_that_is_zero_gives_finite_steps():
    cores = [torch.randn(1, 4, 3), torch.zeros(3, 5, 2), torch.randn(2, 6, 1)]
    left, right = interface_factors(cores)
    gradient = to_orthogonal_gauge(torch.zeros(2, 6, 1), left[2], right[2])
    assert to_core(gradient, left[2], right[2]).isfinite().all()
    assert interface_norms(cores)[1] > 0
    assert interface_norms(cores)[2] == 0
