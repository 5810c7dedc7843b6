"""hf_comera/tt/weighted.py: two factors are the optimum, their error is what they say, refinement never goes up."""

import itertools
import math

import pytest
import torch

from hf_comera.tt.cores import contract_left, contract_right, core_shapes
from hf_comera.tt.decomposition import low_rank_factors, tt_svd
from hf_comera.tt.shapes import useful_ranks
from hf_comera.tt.weighted import OutputSpectrum, refine_cores, weighted_error, weighted_tt

SHAPES = [(7, 5), (5, 7), (12, 12), (1, 4), (4, 1), (30, 8), (8, 30)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random_layer(shape, seed=0, tokens=None):
    """A matrix, and the second moment of inputs with a mean and unequal directions; of few tokens it is singular."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    scales = torch.logspace(0, -2, rows, dtype=torch.float64)
    inputs = torch.randn(tokens or 4 * rows, rows, generator=generator, dtype=torch.float64) * scales + 0.3
    return matrix, inputs.T @ inputs / len(inputs), inputs


def tt_matrix(cores, num_left, shape):
    """The matrix that cores stand for, without padding."""
    left = contract_left(cores[:num_left])[-1][: shape[0]]
    return left @ contract_right(cores[num_left:])[0][:, : shape[1]]


def squared_error(found, matrix, moment):
    difference = found - matrix
    return (difference * (moment @ difference)).sum()


@every_shape
@pytest.mark.parametrize("tokens", [None, 2], ids=["regular", "singular"])
def test_the_error_of_each_rank_is_the_energy_beyond_it(shape, tokens):
    matrix, moment, inputs = random_layer(shape, tokens=tokens)
    spectrum = OutputSpectrum(matrix, moment)
    assert len(spectrum.energies) == min(shape)
    assert (spectrum.energies.diff() <= 1e-12).all()
    for rank in range(1, min(shape) + 1):
        left, right = spectrum.factors(rank)
        found = squared_error(left @ right, matrix, moment).item()
        assert found == pytest.approx(spectrum.squared_error(rank), abs=1e-10)
        by_outputs = (inputs @ (left @ right - matrix)).square().sum().item() / len(inputs)
        assert found == pytest.approx(by_outputs, abs=1e-10)
        assert weighted_error(left @ right, matrix, moment) == pytest.approx(spectrum.relative_error(rank), abs=1e-6)
        torch.testing.assert_close(right @ right.T, torch.eye(rank, dtype=torch.float64))


@every_shape
def test_two_factors_are_stationary_and_better_than_the_plain_ones(shape):
    matrix, moment, _ = random_layer(shape)
    for rank in range(1, min(shape) + 1):
        left, right = (x.requires_grad_() for x in OutputSpectrum(matrix, moment).factors(rank))
        value = squared_error(left @ right, matrix, moment)
        value.backward()
        assert left.grad.abs().max() < 1e-10
        assert right.grad.abs().max() < 1e-10
        plain = low_rank_factors(matrix, rank)
        assert value.item() <= squared_error(plain[0] @ plain[1], matrix, moment).item() + 1e-10


def test_inputs_that_are_all_alike_give_the_plain_optimum():
    matrix, _, _ = random_layer((9, 6))
    singular = torch.linalg.svdvals(matrix)
    spectrum = OutputSpectrum(matrix, torch.eye(9, dtype=torch.float64))
    torch.testing.assert_close(spectrum.energies, singular.square())


@pytest.mark.parametrize("has_mean", [True, False])
def test_centring_never_hurts(has_mean):
    matrix, moment, inputs = random_layer((10, 7))
    mean = inputs.mean(0) if has_mean else torch.zeros(10, dtype=torch.float64)
    centred = OutputSpectrum(matrix, moment - torch.outer(mean, mean))
    for rank in range(1, 8):
        assert centred.squared_error(rank) <= OutputSpectrum(matrix, moment).squared_error(rank) + 1e-12


CASES = [  # sizes, in_factors, out_factors, rank
    ((12, 12), (3, 4), (4, 3), 3),
    ((11, 13), (3, 4), (2, 7), 4),  # padded on both sides
    ((24, 10), (2, 3, 4), (2, 5), 5),
    ((6, 36), (6,), (3, 3, 4), 4),
]


@pytest.mark.parametrize(("shape", "in_factors", "out_factors", "rank"), CASES)
def test_refinement_is_monotone_and_no_better_than_two_factors(shape, in_factors, out_factors, rank):
    matrix, moment, _ = random_layer(shape)
    ranks = useful_ranks((*in_factors, *out_factors), rank)
    spectrum = OutputSpectrum(matrix, moment)
    start = tt_svd(matrix, in_factors, out_factors, ranks)
    errors = []
    for steps in (0, 1, 3, 10, 40):
        cores = refine_cores(start, len(in_factors), matrix, moment, steps) if steps else start
        assert [tuple(core.shape) for core in cores] == core_shapes((*in_factors, *out_factors), ranks)
        errors.append(weighted_error(tt_matrix(cores, len(in_factors), shape), matrix, moment))
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(errors))
    assert errors[-1] >= spectrum.relative_error(ranks[len(in_factors) - 1]) - 1e-9
    assert errors[-1] < errors[0]


@pytest.mark.parametrize(("shape", "in_factors", "out_factors", "rank"), CASES)
def test_weighted_cores_beat_plain_ones_and_are_balanced(shape, in_factors, out_factors, rank):
    matrix, moment, _ = random_layer(shape)
    ranks = useful_ranks((*in_factors, *out_factors), rank)
    cores = weighted_tt(OutputSpectrum(matrix, moment), moment, in_factors, out_factors, ranks)
    plain = tt_svd(matrix, in_factors, out_factors, ranks)
    found, before = (
        weighted_error(tt_matrix([c.double() for c in x], len(in_factors), shape), matrix, moment)
        for x in (cores, plain)
    )
    assert found < before
    sizes = [core.square().mean().sqrt().item() for core in cores]
    assert max(sizes) == pytest.approx(min(sizes), rel=1e-4)
    assert all(core.dtype == torch.float32 for core in cores)


def test_one_factor_a_side_is_the_closed_form():
    matrix, moment, _ = random_layer((9, 14))
    spectrum = OutputSpectrum(matrix, moment)
    cores = weighted_tt(spectrum, moment, (9,), (14,), (4,))
    left, right = spectrum.factors(4)
    torch.testing.assert_close(tt_matrix(cores, 1, (9, 14)).double(), left @ right, rtol=1e-5, atol=1e-6)


def test_a_layer_without_outputs_has_no_error_and_stays():
    matrix, moment = torch.zeros(6, 4, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    spectrum = OutputSpectrum(matrix, moment)
    assert spectrum.relative_error(1) == 0.0
    cores = weighted_tt(spectrum, moment, (2, 3), (2, 2), (2, 2, 2))
    assert all(torch.isfinite(core).all() for core in cores)
    assert weighted_error(tt_matrix(cores, 2, (6, 4)), matrix, moment) == 0.0
    assert math.isfinite(weighted_error(matrix + 1, matrix, moment))
