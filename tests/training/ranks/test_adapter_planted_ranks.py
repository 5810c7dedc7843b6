"""A teacher whose ranks are known is learned by a student of larger ranks; the ranks found are the teacher's."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_comera import RankAdaptation, TTMuon, add_rank_gates, comera_param_groups
from hf_comera.modules import TTLinear
from tests.training.rank_training import train_ranks

RANKS = (2, 4, 3, 5, 2)
SIZE, FACTORS = 64, (4, 4, 4)
STEPS = 600
OPTIMIZERS = {
    "tt_muon": lambda model: TTMuon(model, 3e-3, weight_decay=0.0, gate_lr=1e-2),
    "adamw": lambda model: torch.optim.AdamW(comera_param_groups(model, 3e-3, weight_decay=0.0, gate_lr=1e-2)),
}


def linear(ranks):
    layer = TTLinear(SIZE, SIZE, in_factors=FACTORS, out_factors=FACTORS, ranks=ranks, bias=False)
    layer.reset_parameters(SIZE**-0.5)
    return layer


def learn(teacher, student, settings, optimizer, noise):
    """The loss of the last step."""
    add_rank_gates(student)
    optimizer = OPTIMIZERS[optimizer](student)
    schedule = LambdaLR(optimizer, lambda step: max(0.02, 1 - step / STEPS))

    def new_loss():
        x = torch.randn(128, SIZE)
        y = teacher(x).detach()
        return (student(x) - y - noise * torch.randn_like(y)).square().mean()

    return train_ranks(student, optimizer, settings, STEPS, new_loss, schedule)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_of_the_teachers_size_its_ranks_are_chosen(optimizer, noise):
    torch.manual_seed(1)
    teacher, student = linear(RANKS), linear(8)
    settings = RankAdaptation(target_parameters=teacher.num_core_parameters, early=0.4, late=0.5)
    loss = learn(teacher, student, settings, optimizer, noise)
    assert student.ranks == RANKS
    assert loss < 1.1 * noise**2 + 1e-3  # of a variance of about one


def test_without_a_wanted_size_what_is_not_needed_dies():
    torch.manual_seed(1)
    teacher, student = linear(RANKS), linear(8)
    loss = learn(teacher, student, RankAdaptation(early=0.5, late=0.45), "tt_muon", 0.1)
    assert student.ranks == RANKS
    assert loss < 0.011
