"""training/ranks/pruning.py: cuts slice parameters and optimizer state alike, and training goes on as before."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from hf_comera import CoatAdamW, TTMuon, comera_param_groups
from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.training.ranks.pruning import cut_ranks, drop_removed

OPTIMIZERS = {
    "adamw": lambda model: AdamW(comera_param_groups(model, lr=1e-2)),
    "adamw-loop": lambda model: AdamW(comera_param_groups(model, lr=1e-2), foreach=False),
    "adamw-foreach": lambda model: AdamW(comera_param_groups(model, lr=1e-2), foreach=True),
    "adamw-fused": lambda model: AdamW(comera_param_groups(model, lr=1e-2), fused=True),
    "adamw-amsgrad": lambda model: AdamW(comera_param_groups(model, lr=1e-2), amsgrad=True),
    "adamw-named": lambda model: AdamW(model.named_parameters(), lr=1e-2),
    "sgd": lambda model: SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "coat": lambda model: CoatAdamW(comera_param_groups(model, lr=1e-2)),
    "tt-muon": lambda model: TTMuon(model, lr=1e-2),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
as_it_is = pytest.mark.parametrize("make", [make for name, make in OPTIMIZERS.items() if name != "coat"])
ELEMENTWISE = [
    name for name in OPTIMIZERS if name not in ("tt-muon", "coat")
]  # a step of a rank does not depend on the others

KEPT = {
    "0": [torch.tensor(i) for i in ([0, 2, 3], [1], [0, 1, 2, 4])],
    "2": [torch.tensor(i) for i in ([2, 3], [0, 2, 3, 1])],
    "3": [torch.tensor(i) for i in ([1, 2, 4], [3, 0])],
}
GONE = {"2": [torch.arange(4), torch.arange(0)]}


def new_model():
    """A chain of layers of unequal orders with gates; the embedding comes first, its cores have four axes."""
    torch.manual_seed(0)
    linears = [
        TTLinear(12, 20, in_factors=(4, 3), out_factors=(4, 5), ranks=(4, 5, 5), dtype=torch.float64),
        nn.Linear(20, 14, dtype=torch.float64),
        TTLinear(14, 9, in_factors=(7, 2), out_factors=(9,), ranks=(4, 4), dtype=torch.float64),
    ]
    embedding = TTMEmbedding(5, 12, in_factors=(2, 1, 3), out_factors=(3, 2, 2), ranks=(5, 4), dtype=torch.float64)
    model = nn.Sequential(*linears, embedding)
    for layer in trains(model).values():
        layer.add_rank_gates()
        for gate in layer.rank_gates():
            gate.data.uniform_(0.5, 1.5)
    return model


def trains(model):
    return {"0": model[0], "2": model[2], "3": model[3]}


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 5, (8,), generator=generator)
        model[:3](model[3](ids)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make, steps=3):
    model = new_model()
    optimizer = make(model)
    train(model, optimizer, steps)
    return model, optimizer


def expected_slice(name, tensor, kept=KEPT):
    """``tensor`` of the parameter ``name`` without the ranks that go, by plain indexing."""
    layer, _, kind = name.partition(".")
    if layer not in kept or "bias" in kind:
        return tensor
    place = int(kind.rpartition("_")[2])
    if "gate" in kind:
        return tensor[kept[layer][place]]
    bonds = [torch.arange(1), *kept[layer], torch.arange(1)]
    return tensor[bonds[place]][..., bonds[place + 1]]


def held(optimizer):
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


@as_it_is
def test_parameters_gradients_and_state_are_sliced_exactly(make):
    model, optimizer = trained(make)
    ids = torch.arange(5)
    model[:3](model[3](ids)).sum().backward()
    before = {
        name: (p.detach().clone(), p.grad.clone(), copy.deepcopy(dict(optimizer.state[p])))
        for name, p in model.named_parameters()
    }
    cut_ranks(trains(model), KEPT, optimizer)
    assert [layer.ranks for layer in trains(model).values()] == [(3, 1, 4), (2, 4), (3, 2)]
    for name, parameter in model.named_parameters():
        value, grad, state = before[name]
        assert torch.equal(parameter, expected_slice(name, value))
        assert torch.equal(parameter.grad, expected_slice(name, grad))
        assert optimizer.state[parameter].keys() == state.keys()
        for key, old in state.items():
            if key == "mean_norm":  # beside the norm of the momentum it says how sure a core is of its step
                before_cut, after_cut = state["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"]
                old = old * after_cut.norm() / before_cut.norm()
            sliced = expected_slice(name, old) if getattr(old, "shape", None) == value.shape else old
            assert torch.equal(optimizer.state[parameter][key], sliced)


@every_optimizer
@pytest.mark.parametrize("kept", [KEPT, GONE, {**KEPT, **GONE}], ids=["cut", "removed", "both"])
def test_the_optimizer_holds_every_live_parameter_and_no_dead_one(make, kept):
    model, optimizer = trained(make)
    cut_ranks(trains(model), kept, optimizer)
    live = [id(parameter) for parameter in model.parameters() if parameter.numel()]
    assert sorted(held(optimizer)) == sorted(live)
    assert {id(parameter) for parameter in optimizer.state} == set(live)
    assert all(p.requires_grad == (p.numel() > 0) for p in model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, 1)
    changed = [not torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True)]
    upstream = ["2" in kept and kept["2"] is GONE["2"] and name[0] != "2" for name, _ in model.named_parameters()]
    assert all(c or p.numel() == 0 or u for c, p, u in zip(changed, model.parameters(), upstream, strict=True))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_next_steps_equal_those_of_zero_gates(name):
    """Of a model whose gates are held at zero instead of being cut."""
    (cut, cut_optimizer), (uncut, uncut_optimizer) = trained(OPTIMIZERS[name]), trained(OPTIMIZERS[name])
    cut_ranks(trains(cut), KEPT, cut_optimizer)
    for step in range(4):
        for layer, indices in KEPT.items():
            for gate, index in zip(trains(uncut)[layer].rank_gates(), indices, strict=True):
                gate.data *= torch.zeros_like(gate).index_fill(0, index, 1)
        torch.testing.assert_close(*(model[:3](model[3](torch.arange(5))) for model in (cut, uncut)))
        train(cut, cut_optimizer, 1, seed=step)
        train(uncut, uncut_optimizer, 1, seed=step)
    for name, parameter in cut.named_parameters():
        torch.testing.assert_close(parameter, expected_slice(name, uncut.get_parameter(name)))


@every_optimizer
def test_groups_stay_consistent(make):
    model, optimizer = trained(make)
    cut_ranks(trains(model), {**KEPT, **GONE}, optimizer)
    check_groups(model, optimizer)


def check_groups(model, optimizer):
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        for key in {"names", "param_names"} & group.keys():
            assert all(named[name] is p for name, p in zip(group[key], group["params"], strict=True))
        if group.get("trains") is not None:
            assert sum(entry[0] for entry in group["trains"]) == len(group["params"])


def test_the_record_of_trains_loses_the_removed_one():
    model, optimizer = trained(OPTIMIZERS["tt-muon"])
    cut_ranks(trains(model), {"0": [torch.arange(0)] * 3}, optimizer)
    group = optimizer.param_groups[0]
    assert group["names"] == [f"{layer}.core_{place}" for layer in (2, 3) for place in range(3)]
    assert group["trains"] == [(3, 2, 14 * 9), (3, 1, 5 * 12)]
    fresh = TTMuon(model, lr=1e-2)
    groups = [{group["group_name"]: group["names"] for group in each.param_groups} for each in (optimizer, fresh)]
    assert groups[0] == groups[1]
    assert fresh.param_groups[0]["trains"] == group["trains"]


@every_optimizer
def test_all_layers_may_go(make):
    model, optimizer = trained(make)
    layers = {**trains(model)}
    cut_ranks(layers, {name: [torch.arange(0)] * (layer.num_cores - 1) for name, layer in layers.items()}, optimizer)
    model[3].requires_grad_(False)
    optimizer.zero_grad()
    before = model[2].bias.detach().clone()
    train(model, optimizer, 2)
    assert not torch.equal(model[2].bias, before)


def test_tt_muon_goes_on_without_any_core():
    model = nn.Sequential(TTLinear(12, 20))
    optimizer = TTMuon(model)
    cut_ranks({"0": model[0]}, {"0": [torch.arange(0)] * 5}, optimizer)
    model(torch.randn(3, 12)).sum().backward()
    optimizer.step()
    assert model[0].bias.ne(0).all()


@as_it_is
def test_bytes_of_the_state_shrink_with_the_model(make):
    model, optimizer = trained(make)

    def sizes():
        states = {name: optimizer.state.get(p, {}).values() for name, p in model.named_parameters()}
        return {name: sum(value.nbytes for value in state if value.ndim) for name, state in states.items()}

    before, numels = sizes(), {name: p.numel() for name, p in model.named_parameters()}
    cut_ranks(trains(model), {**KEPT, **GONE}, optimizer)
    after = {name: before[name] * p.numel() // numels[name] for name, p in model.named_parameters()}
    assert sizes() == after
    assert sum(after.values()) < 0.8 * sum(before.values())


@every_optimizer
def test_states_of_cut_models_load_again(make):
    model, optimizer = trained(make)
    cut_ranks(trains(model), {**KEPT, **GONE}, optimizer)
    twin = new_model()
    resumed = make(twin)
    twin.load_state_dict(model.state_dict())
    drop_removed(resumed)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (twin, resumed)):
        train(*each, 2, seed=5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("wrapped", [False, True])
def test_wrappers_are_looked_through_and_none_will_do(wrapped):
    model, optimizer = trained(OPTIMIZERS["adamw"])
    wrapper = nn.Module()
    wrapper.optimizer = optimizer
    cut_ranks(trains(model), KEPT, wrapper if wrapped else None)
    assert model[0].ranks == (3, 1, 4)
    assert (sorted(held(optimizer)) == sorted(map(id, model.parameters()))) == wrapped


def test_state_of_one_entry_is_left_alone():
    model, optimizer = trained(OPTIMIZERS["sgd"])
    factored = {"scale": torch.ones(1), "count": torch.tensor(3.0), "steps": 7, "nothing": None}
    optimizer.state[model[0].core_1] = {**factored, "full": torch.ones(4, 3, 5)}
    cut_ranks(trains(model), KEPT, optimizer)
    state = optimizer.state[model[0].core_1]
    assert state.pop("full").shape == (3, 3, 1)
    assert all(state[key] is value for key, value in factored.items())


FAULTS = {
    "lacks-a-core": (
        lambda model: SGD([p for p in model.parameters() if p is not model[2].core_1]),
        KEPT,
        "1 train.*core_1",
    ),
    "lacks-gates": (lambda model: SGD(model[0].cores()), {"0": KEPT["0"]}, r"3 trainable.*rank_gate_0\. Make"),
    "too-few-bonds": (OPTIMIZERS["sgd"], {**KEPT, "2": KEPT["2"][:1]}, r"kept\['2'\] has 1 entries.*2 inner bonds"),
}


@pytest.mark.parametrize(("make", "kept", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_refused_cut_changes_nothing(make, kept, message):
    model = new_model()
    optimizer = make(model)
    before, parameters = held(optimizer), list(model.parameters())
    with pytest.raises(ValueError, match=message):
        cut_ranks(trains(model), kept, optimizer)
    assert held(optimizer) == before
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))


def test_frozen_parameters_need_no_place_in_the_optimizer():
    model = new_model()
    model[2].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    cut_ranks(trains(model), KEPT, optimizer)
    assert model[2].ranks == (2, 4)
    assert not any(parameter.requires_grad for parameter in model[2].parameters())


def test_state_that_cannot_be_cut_is_refused_and_nothing_changes():
    model, optimizer = trained(OPTIMIZERS["sgd"])
    optimizer.state[model[2].core_1]["row"] = torch.ones(3, 2, 1)
    before = list(model.parameters())
    with pytest.raises(ValueError, match=r"SGD keeps 'row' of shape .* Use an optimizer whose state has the shapes"):
        cut_ranks(trains(model), KEPT, optimizer)
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
