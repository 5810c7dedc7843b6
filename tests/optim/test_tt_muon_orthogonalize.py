"""hf_comera/optim/tt_muon.py: singular values become about one, singular vectors stay."""

import pytest
import torch

from hf_comera.optim.tt_muon import orthogonalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (5, 5), (1, 4), (4, 1), (2, 240, 30), (3, 30, 240)])
def test_singular_values_come_near_one(shape, dtype):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=dtype)
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert 0.6 < values.min()
    assert values.max() < 1.25


def test_singular_vectors_stay():
    left, values, right = torch.linalg.svd(torch.randn(12, 5, dtype=torch.float64), full_matrices=False)
    result = left.mT @ orthogonalize(left @ values.diag() @ right) @ right.mT
    torch.testing.assert_close(result, result.diagonal().diag(), atol=1e-9, rtol=0)


def test_agrees_with_the_iteration_on_the_matrix_itself():
    matrix = torch.randn(40, 9, dtype=torch.float64)
    iterate = matrix / matrix.norm()
    for _ in range(5):
        gram = iterate @ iterate.mT
        iterate = 3.4445 * iterate - 4.7750 * gram @ iterate + 2.0315 * gram @ gram @ iterate
    torch.testing.assert_close(orthogonalize(matrix), iterate)


def test_scale_does_not_matter_and_zero_stays_zero():
    matrix = torch.randn(6, 4)
    torch.testing.assert_close(orthogonalize(matrix * 1e-12), orthogonalize(matrix), atol=1e-4, rtol=1e-3)
    assert torch.equal(orthogonalize(torch.zeros(6, 4)), torch.zeros(6, 4))


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (5, 5)])
def test_padding_stays_zero_and_changes_nothing(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    for rows, columns in [(0, 6), (6, 0), (2, 2)]:  # also where the other side becomes the longer one
        padded = orthogonalize(torch.nn.functional.pad(matrix, (0, columns, 0, rows)))
        expected = torch.nn.functional.pad(orthogonalize(matrix), (0, columns, 0, rows))
        torch.testing.assert_close(padded, expected)
        assert torch.equal(padded == 0, expected == 0)
