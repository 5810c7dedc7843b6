"""A dense rate carries over: first updates move the implied matrix as far as AdamW moves a dense one."""

import pytest
import torch

from hf_comera import TTMuon, comera_param_groups
from hf_comera.modules import TTLinear
from hf_comera.tt.shapes import factorize

# Gradients of a few directions, as real ones are: AdamW's first step on them is about half as long as it can be, which
# is also what is seen in the first steps of a small GPT-2 (0.4 to 0.9).
DIRECTIONS = 4
SHAPES = [(64, 64), (64, 4096), (256, 1024), (1024, 256), (2048, 2048), (4096, 64)]
RANKS = (4, 32, 256)
LR = 1e-5


def spectral_norm(matrix):
    """By power iteration: exact enough for a factor of two."""
    vector = torch.randn(matrix.shape[1])
    for _ in range(15):
        image = matrix @ vector
        vector = matrix.T @ (image / image.norm())
        norm = vector.norm()
        vector = vector / norm
    return norm.item()


def adamw(layer):
    return torch.optim.AdamW(comera_param_groups(layer, LR, weight_decay=0.0))


def tt_muon(layer):
    return TTMuon(layer, LR, weight_decay=0.0)


@pytest.mark.parametrize("new_optimizer", [adamw, tt_muon])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [*SHAPES, pytest.param((4096, 4096), marks=pytest.mark.slow)], ids=str)
def test_first_update_is_as_long_as_that_of_the_dense_matrix(shape, order, new_optimizer):
    torch.manual_seed(0)
    rows, columns = shape
    direction = torch.randn(rows, DIRECTIONS) @ torch.randn(DIRECTIONS, columns)
    dense_update = LR * spectral_norm(direction.sign())
    factors = {"in_factors": factorize(rows, order)[::-1], "out_factors": factorize(columns, order)}
    for rank in RANKS:
        layer = TTLinear(rows, columns, ranks=rank, bias=False, **factors)
        layer.reset_parameters(0.02)
        before = layer.dense().detach().T.double()
        (layer.dense().T * direction).sum().backward()
        new_optimizer(layer).step()
        update = (layer.dense().detach().T.double() - before).float()
        assert 0.5 < spectral_norm(update) / dense_update < 2.0, f"rank {rank}"
