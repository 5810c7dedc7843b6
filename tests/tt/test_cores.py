"""hf_comera/tt/cores.py: chains agree with multiplying out, gradients with autograd, draws have the asked size."""

import math

import pytest
import torch

from hf_comera.tt.cores import (
    contract_left,
    contract_left_backward,
    contract_right,
    contract_right_backward,
    count_parameters,
    draw_cores,
    train_norm,
)
from tests.dense_references import multiply_out, random_cores

CHAINS = [((4, 3), 2), ((2, 3, 4), 3), ((5,), 1), ((1, 3, 1, 2), 2)]  # (factors, rank)


@pytest.mark.parametrize(("factors", "rank"), CHAINS)
def test_left_half_and_its_gradients(factors, rank):
    cores = random_cores(factors, (rank,), rank)[:-1]
    prefixes = contract_left(cores)
    expected = torch.eye(1, dtype=torch.float64)
    for core in cores:
        expected = torch.tensordot(expected, core, dims=1)
    torch.testing.assert_close(prefixes[-1], expected.reshape(prefixes[-1].shape))
    grad = torch.randn_like(prefixes[-1])
    assert_equal_gradients(
        cores, expected.reshape(grad.shape), grad, contract_left_backward(cores, prefixes[:-1], grad)
    )


@pytest.mark.parametrize(("factors", "rank"), CHAINS)
def test_right_half_and_its_gradients(factors, rank):
    cores = random_cores((rank,), factors, rank)[1:]
    suffixes = contract_right(cores)
    expected = cores[0]
    for core in cores[1:]:
        expected = torch.tensordot(expected, core, dims=1)
    expected = expected.reshape(suffixes[0].shape)
    torch.testing.assert_close(suffixes[0], expected)
    grad = torch.randn_like(suffixes[0])
    assert_equal_gradients(cores, expected, grad, contract_right_backward(cores, suffixes[1:], grad))


def assert_equal_gradients(cores, product, grad, ours):
    for mine, reference in zip(ours, torch.autograd.grad(product, cores, grad), strict=True):
        torch.testing.assert_close(mine, reference)


def test_parameters_of_the_published_attention_layer():
    assert count_parameters((12, 8, 8, 8, 8, 12), (12, 30, 30, 30, 12)) == 20_448


@pytest.mark.parametrize("rank", [1, 4, 30])
@pytest.mark.parametrize("std", [0.02, 1.0])
def test_draws_have_exactly_the_asked_root_mean_square(rank, std):
    cores = random_cores((8, 6), (6, 8), rank)
    draw_cores([core.data for core in cores], std)
    matrix = multiply_out([core.detach() for core in cores])
    assert matrix.square().mean().sqrt().item() == pytest.approx(std, rel=1e-6)
    deviations = [core.std().item() for core in cores if core.numel() > 100]
    assert max(deviations, default=1.0) < 1.5 * min(deviations, default=1.0)


def test_norm_agrees_with_the_dense_tensor():
    cores = random_cores((3, 4), (5, 2), 3)
    assert train_norm(cores) == pytest.approx(multiply_out(cores).norm().item(), rel=1e-12)


DRAWS = [((8, 6), (6, 8), 5, None), ((4, 3, 5), (3, 5, 4), 7, None), ((24,), (30,), 8, None), ((6, 4), (20,), 8, 2)]


@pytest.mark.parametrize(("in_factors", "out_factors", "rank", "num_left"), DRAWS)
def test_draws_have_a_flat_spectrum(in_factors, out_factors, rank, num_left):
    cores = [core.detach() for core in random_cores(in_factors, out_factors, rank)]
    draw_cores(cores, 0.02, num_left)
    rows = math.prod(in_factors)
    values = torch.linalg.svdvals(multiply_out(cores).reshape(rows, -1))[:rank]
    torch.testing.assert_close(values, values.mean().expand(rank))


@pytest.mark.parametrize(("in_factors", "out_factors", "rank", "num_left"), DRAWS)
def test_draws_give_all_cores_gradients_of_one_size(in_factors, out_factors, rank, num_left):
    torch.manual_seed(0)
    cores = random_cores(in_factors, out_factors, rank)
    draw_cores([core.data for core in cores], 0.02, num_left)
    matrix = multiply_out(cores)
    squares = torch.zeros(len(cores), dtype=torch.float64)
    for _ in range(30):
        gradients = torch.autograd.grad(matrix, cores, torch.randn_like(matrix), retain_graph=True)
        squares += torch.stack([gradient.square().mean() for gradient in gradients])
    assert squares.max() < 2 * squares.min()
