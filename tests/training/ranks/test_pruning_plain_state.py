"""hf_comera/training/ranks/pruning.py: quantised moments are cut and turned with their cores, and no others change."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from hf_comera import CoatAdamW, comera_param_groups
from hf_comera.modules import TTLinear
from hf_comera.training.ranks.pruning import check_moments, cut_ranks, plain_state, set_plain_state, to_canonical_basis

MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT = [torch.tensor(index) for index in ([0, 1, 2, 4, 6, 7], [1, 2, 3, 5, 6, 7, 8, 9], [0, 2, 3, 4, 5, 6, 8, 9])]


def new_model(seed=0):
    torch.manual_seed(seed)
    cores = {"in_factors": [8, 12], "out_factors": [12, 10], "ranks": [8, 10, 10]}
    model = nn.Sequential(TTLinear(96, 120, **cores), nn.Linear(120, 20))
    model[0].add_rank_gates()
    return model


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(16, 96, generator=generator)
        (model(inputs) - inputs[:, :20].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make=CoatAdamW):
    model = new_model()
    optimizer = make(comera_param_groups(model, lr=1e-3))
    train(model, optimizer, 5)
    return model, optimizer


def sliced(place, tensor):
    bonds = [torch.arange(1), *KEPT, torch.arange(1)]
    return tensor[bonds[place]][..., bonds[place + 1]]


def test_moments_are_those_of_the_slice_and_no_others_change():
    model, optimizer = trained()
    cores = [(core, optimizer.plain_state(core)) for core in model[0].cores()]
    others = {p: dict(optimizer.state[p]) for p in [model[0].bias, *model[1].parameters()]}
    cut_ranks({"0": model[0]}, {"0": KEPT}, optimizer)
    for place, (core, (old, before)) in enumerate(zip(model[0].cores(), cores, strict=True)):
        assert old not in optimizer.state
        found = optimizer.plain_state(core)
        assert optimizer.state[core]["exp_avg"].dtype == torch.uint8
        assert found["step"] == before["step"] == 5
        for key in MOMENTS:
            expected = sliced(place, before[key])
            assert found[key].shape == core.shape
            assert (found[key] - expected).norm() <= 0.03 * expected.norm()
    for parameter, state in others.items():
        assert all(optimizer.state[parameter][key] is value for key, value in state.items())


def test_resuming_after_a_cut_is_bit_exact(tmp_path):
    model, optimizer = trained()
    cut_ranks({"0": model[0]}, {"0": KEPT}, optimizer)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "cut.pt")
    train(model, optimizer, 3, seed=1)
    resumed = new_model(seed=1)
    cut_ranks({"0": resumed[0]}, {"0": KEPT})
    saved = torch.load(tmp_path / "cut.pt", weights_only=True)
    resumed.load_state_dict(saved[0])
    named = {id(p): name for name, p in model.named_parameters()}
    groups = [[resumed.get_parameter(named[id(p)]) for p in group["params"]] for group in optimizer.param_groups]
    again = CoatAdamW([{"params": group} for group in groups])
    again.load_state_dict(saved[1])
    train(resumed, again, 3, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


def test_moments_turn_with_the_basis():
    model, optimizer = trained()
    check_moments({"0": model[0]}, optimizer)
    reference = copy.deepcopy(model)
    theirs = AdamW(comera_param_groups(reference, lr=1e-3))
    for parameter, copied in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.state[copied] = copy.deepcopy(plain_state(optimizer, parameter))
    for layer, each in ((model[0], optimizer), (reference[0], theirs)):
        to_canonical_basis({"0": layer}, each)
    for parameter, copied in zip(model[0].tt_parameters(), reference[0].tt_parameters(), strict=True):
        plain, expected = plain_state(optimizer, parameter), theirs.state[copied]
        for key in MOMENTS:
            assert (plain[key] - expected[key]).norm() <= 0.05 * expected[key].norm()


@pytest.mark.parametrize("make", [CoatAdamW, AdamW])
@pytest.mark.parametrize("wrapped", [False, True])
def test_reading_and_writing_through_wrappers(make, wrapped):
    model, optimizer = trained(make)
    wrapper = nn.Module()
    wrapper.optimizer = optimizer
    outer = wrapper if wrapped else optimizer
    core = model[0].core_1
    state = plain_state(outer, core)
    state["exp_avg"] = torch.zeros_like(core)
    set_plain_state(outer, core, state)
    assert not plain_state(outer, core)["exp_avg"].any()
    assert plain_state(outer, core)["exp_avg_sq"].any()


def test_nothing_is_made_of_nothing():
    model = new_model()
    optimizer = CoatAdamW(model.parameters())
    assert plain_state(optimizer, model[0].core_0) == {}
    set_plain_state(optimizer, model[0].core_0, {})
    assert not optimizer.state
