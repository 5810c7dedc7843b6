"""hf_comera/ops/rank_activation.py: torch's nonlinearities, zero at zero, unknown names refused."""

import pytest
import torch
from torch.nn import functional

from hf_comera.ops import tt_linear
from hf_comera.ops.rank_activation import RANK_ACTIVATIONS, check_rank_activation, shrinkage
from tests.dense_references import random_cores


@pytest.mark.parametrize("name", RANK_ACTIVATIONS)
def test_equals_torch(name):
    code = torch.randn(50, dtype=torch.float64)
    torch.testing.assert_close(RANK_ACTIVATIONS[name](code), getattr(functional, name)(code))


@pytest.mark.parametrize("name", RANK_ACTIVATIONS)
def test_padded_rank_columns_stay_zero(name):
    assert RANK_ACTIVATIONS[name](torch.zeros(1)).item() == 0.0


@pytest.mark.parametrize("name", [None, *RANK_ACTIVATIONS])
def test_known_names_pass(name):
    check_rank_activation(name)


@pytest.mark.parametrize("name", ["relu", "SiLU", "", True, ["silu"]], ids=repr)
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=r"rank_activation=.* is unknown. Use one of 'gelu', 'silu', .* or None"):
        check_rank_activation(name)


def test_the_operator_refuses_them_too():
    with pytest.raises(ValueError, match="rank_activation='relu' is unknown"):
        tt_linear(torch.randn(2, 6), random_cores((2, 3), (4, 2), 3, torch.float32), 2, rank_activation="relu")


@pytest.mark.parametrize("name", RANK_ACTIVATIONS)
@pytest.mark.parametrize("deviation", [1e-3, 0.3, 1.0, 5.0])
def test_shrinkage_is_that_of_normal_numbers(name, deviation):
    z = deviation * torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = RANK_ACTIVATIONS[name](z).norm() / z.norm()
    assert shrinkage(name, deviation) == pytest.approx(expected.item(), rel=1e-2)
