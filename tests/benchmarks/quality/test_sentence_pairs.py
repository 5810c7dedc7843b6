"""benchmarks/quality/sentence_pairs.py: ranks are those of Spearman."""

import pytest
import torch

from benchmarks.quality import sentence_pairs


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3, 1, 2], [3, 1, 2]), ([5, 5, 1, 5], [3, 3, 1, 3]), ([0, 0], [1.5, 1.5])],
    ids=str,
)
def test_equal_values_share_the_mean_of_their_places(values, expected):
    assert torch.equal(sentence_pairs.ranks(torch.tensor(values)), torch.tensor(expected, dtype=torch.float64))
