"""hf_comera/optim/moved_state.py: state goes where the parameters go, and that of other shapes is refused by name."""

import copy

import pytest
import torch
from torch import nn

from hf_comera import CoatAdamW, TTMuon
from hf_comera.modules import TTLinear

OPTIMIZERS = {"tt_muon": TTMuon, "coat_adamw": lambda model, **rates: CoatAdamW(model.parameters(), **rates)}
every_optimizer = pytest.mark.parametrize("new_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def network(ranks=4):
    torch.manual_seed(0)
    return nn.Sequential(TTLinear(12, 20, ranks=ranks), nn.Linear(20, 40), nn.LayerNorm(40))


def train(model, optimizer, steps=1):
    for _ in range(steps):
        x = torch.linspace(-1, 1, 36, dtype=model[1].weight.dtype).view(3, 12)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@every_optimizer
@pytest.mark.parametrize("new", DTYPES, ids=str)
@pytest.mark.parametrize("old", DTYPES, ids=str)
def test_training_goes_on_in_another_dtype(old, new, new_optimizer):
    model = network().to(old)
    optimizer = new_optimizer(model, lr=1e-3)
    train(model, optimizer, 2)
    reloaded, resumed = network().to(new), None
    reloaded.load_state_dict(model.state_dict())
    resumed = new_optimizer(reloaded, lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch has it follow the parameters
    before = copy.deepcopy(model.to(new))
    for trained, its in ((model, optimizer), (reloaded, resumed)):
        train(trained, its)
    for moved, loaded, stale in zip(model.parameters(), reloaded.parameters(), before.parameters(), strict=True):
        assert moved.dtype == new
        torch.testing.assert_close(moved, loaded, rtol=1e-2, atol=1e-6)
        assert moved.isfinite().all()
        assert not torch.equal(moved, stale) or new in (torch.bfloat16, torch.float16)
    assert {state["step"].dtype for state in optimizer.state.values() if "step" in state} == {torch.float32}


@every_optimizer
def test_a_state_of_other_ranks_is_refused_and_nothing_changes(new_optimizer):
    small, large = network(ranks=2), network(ranks=4)
    optimizers = [new_optimizer(model, lr=1e-3) for model in (small, large)]
    for model, optimizer in zip((small, large), optimizers, strict=True):
        train(model, optimizer)
    before = copy.deepcopy(optimizers[1].state_dict())
    with pytest.raises(ValueError, match=r"has shape \(.*the parameter has \(.*saved with this model"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    after = optimizers[1].state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(value, after["state"][index][key]) for key, value in state.items())
    train(large, optimizers[1])


def test_the_refusal_names_the_core():
    states = []
    for ranks in (2, 4):
        model = network(ranks)
        optimizer = TTMuon(model)
        train(model, optimizer)
        states.append(optimizer)
    with pytest.raises(ValueError, match=r"'momentum_buffer' of '0\.core_0' has shape \(1, 3, 2\), .* \(1, 3, 3\)"):
        states[1].load_state_dict(states[0].state_dict())


@every_optimizer
def test_integers_are_no_moments(new_optimizer):
    model = network()
    optimizer = new_optimizer(model, lr=1e-3)
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for key in ("momentum_buffer", "exp_avg"):
            if key in entry:
                entry[key] = entry[key].int()
                entry.pop(f"{key}_scales", None)
    with pytest.raises(ValueError, match=r"in torch.int32, and a floating-point dtype is needed"):
        optimizer.load_state_dict(state)


def test_other_data_in_a_core_is_refused_at_the_step():
    model = network()
    optimizer = TTMuon(model)
    train(model, optimizer)
    model[0].core_0.data = torch.ones(1, 2, 4)
    model[0].core_0.grad = torch.ones(1, 2, 4)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 4\), but its 'momentum_buffer' has .* Make a new optimizer"):
        optimizer.step()
