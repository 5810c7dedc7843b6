"""Canonical bases: an exact change of basis after which ranks are orthogonal and sorted by singular values."""

import pytest
import torch

from hf_comera.tt.gauge import canonical_bases, to_basis

SHAPES = {
    "two cores": [(1, 6, 4), (4, 5, 1)],
    "six cores": [(1, 4, 4), (4, 3, 7), (7, 4, 6), (6, 2, 5), (5, 4, 3), (3, 5, 1)],
    "odd and ones": [(1, 3, 2), (2, 1, 2), (2, 7, 1), (1, 5, 1)],
    "embedding": [(1, 4, 2, 5), (5, 3, 3, 6), (6, 4, 2, 1)],
}


def train(shapes):
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def implied(cores):
    product = cores[0].flatten(0, -2)
    for core in cores[1:]:
        product = (product @ core.flatten(1)).view(-1, core.shape[-1])
    return product.flatten()


def moved(cores, bases, inverses):
    edges = [None, *inverses], [*bases, None]
    return [to_basis(core, before, behind) for core, before, behind in zip(cores, *edges, strict=True)]


def unfolding(cores, bond):
    rows = torch.Size(size for core in cores[:bond] for size in core.shape[1:-1]).numel()
    return implied(cores).view(rows, -1)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_implied_tensor_stays(shapes):
    cores = train(shapes)
    bases, inverses, _ = canonical_bases(cores)
    torch.testing.assert_close(implied(moved(cores, bases, inverses)), implied(cores))
    for basis, inverse in zip(bases, inverses, strict=True):
        torch.testing.assert_close(inverse @ basis, torch.eye(len(basis), dtype=torch.float64))


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_spectra_are_the_singular_values_of_the_unfoldings(shapes):
    cores = train(shapes)
    for bond, values in enumerate(canonical_bases(cores)[2], start=1):
        expected = torch.linalg.svdvals(unfolding(cores, bond))[: len(values)]
        torch.testing.assert_close(values, expected, atol=1e-6 * expected[0].item(), rtol=1e-6)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_leaving_the_last_ranks_out_is_the_best_approximation_at_each_bond(shapes):
    cores = train(shapes)
    bases, inverses, spectra = canonical_bases(cores)
    new = moved(cores, bases, inverses)
    for bond, values in enumerate(spectra, start=1):
        keep = max(1, len(values) // 2)
        cut = [*new[: bond - 1], new[bond - 1][..., :keep], new[bond][:keep], *new[bond + 1 :]]
        error = (implied(cut) - implied(cores)).norm()
        torch.testing.assert_close(error, values[keep:].norm(), atol=1e-8, rtol=1e-6)


def test_unused_ranks_have_singular_values_of_zero_and_stay_finite():
    cores = train(SHAPES["six cores"])
    cores[1][:, :, 4:] = cores[1][:, :, :3]  # of seven ranks four can be told apart
    bases, inverses, spectra = canonical_bases(cores)
    assert (spectra[1][4:] < 1e-4 * spectra[1][0]).all()
    torch.testing.assert_close(implied(moved(cores, bases, inverses)), implied(cores))
    zero = [torch.zeros_like(core) for core in cores]
    assert all(part.isfinite().all() for parts in canonical_bases(zero) for part in parts)


def test_cores_keep_their_dtype():
    cores = [core.float() for core in train(SHAPES["six cores"])]
    bases, inverses, _ = canonical_bases(cores)
    new = moved(cores, bases, inverses)
    assert all(core.dtype == torch.float32 for core in new)
    torch.testing.assert_close(implied(new), implied(cores), atol=1e-3, rtol=1e-4)
