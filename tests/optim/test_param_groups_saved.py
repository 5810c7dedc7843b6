"""hf_comera/optim/param_groups.py: states load by name, also where the groups would be others by now."""

import copy

import pytest
import torch
from torch import nn

from hf_comera import CoatAdamW, comera_param_groups
from hf_comera.modules import TTLinear
from hf_comera.optim import take_saved_groups

OPTIMIZERS = {
    "coat": lambda model: CoatAdamW(comera_param_groups(model, lr=1e-3)),
    "adamw": lambda model: torch.optim.AdamW(comera_param_groups(model, lr=1e-3)),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(TTLinear(64, 64, ranks=8) for _ in range(3)))


def train(model, optimizer, steps):
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_goes_on_where_norms_would_make_other_groups(name):
    make = OPTIMIZERS[name]
    model = network()
    optimizer = make(model)
    for core in model[1].cores():  # norms that no group has had
        core.data.mul_(1.4)
    train(model, optimizer, 4)
    resumed = network()
    resumed.load_state_dict(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    other = make(resumed)
    assert [g["names"] for g in other.param_groups] != [g["names"] for g in optimizer.param_groups]
    if name == "adamw":
        take_saved_groups(other, state["param_groups"])
    other.load_state_dict(state)
    train(model, optimizer, 3)
    train(resumed, other, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_the_state_of_another_model_is_refused():
    model = network()
    optimizer = OPTIMIZERS["coat"](model)
    train(model, optimizer, 1)
    other = OPTIMIZERS["coat"](network()[:2])
    before = [group["names"] for group in other.param_groups]
    with pytest.raises(ValueError, match=r"of another model: '2\.\w+' is in the state, but not in the optimizer"):
        other.load_state_dict(optimizer.state_dict())
    assert [group["names"] for group in other.param_groups] == before


def test_groups_without_names_stay_as_they_are():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    groups = optimizer.param_groups[:]
    take_saved_groups(optimizer, torch.optim.SGD(model.parameters()).state_dict()["param_groups"])
    assert optimizer.param_groups == groups
