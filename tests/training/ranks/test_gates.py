"""hf_comera/training/ranks/gates.py: gates come and go with model and optimizer; what would spoil them is refused."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from hf_comera import ComeraConfig, TTMuon, comera_param_groups, get_comera_model
from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.training.ranks.gates import add_rank_gates, bare_model, check_gates, fold_rank_gates, gate_rate
from hf_comera.training.ranks.pruning import cut_ranks
from tests.architectures import every_architecture

OPTIMIZERS = {
    "adamw": lambda model: AdamW(comera_param_groups(model, lr=1e-3)),
    "adamw-named": lambda model: AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.0),
    "sgd": lambda model: SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "tt-muon": lambda model: TTMuon(model, lr=1e-3),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def small_model(gates=True):
    model = nn.Sequential(TTMEmbedding(57, 12, ranks=4), TTLinear(12, 20, ranks=3), nn.Linear(20, 3))
    if gates:
        add_rank_gates(model)
    return model


def frozen_since(model):
    model[0].core_1.requires_grad_(False)
    return model


def step(model, optimizer):
    model(torch.arange(9)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@every_architecture
def test_every_layer_gets_gates_and_computes_the_same(architecture):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    inputs = architecture.inputs()
    expected = model(**inputs).logits
    add_rank_gates(model)
    assert torch.equal(model(**inputs).logits, expected)
    gated = {name.rpartition(".")[0] for name, _ in model.named_parameters() if "rank_gate_" in name}
    assert len(gated) == architecture.num_layers
    fold_rank_gates(model)
    assert torch.equal(model(**inputs).logits, expected)
    assert not any("rank_gate_" in name for name, _ in model.named_parameters())


def test_gates_that_are_there_stay():
    model = small_model()
    model[1].rank_gate_0.data.fill_(0.5)
    gates = model[0].rank_gates() + model[1].rank_gates()
    add_rank_gates(model)
    assert all(new is old for new, old in zip(model[0].rank_gates() + model[1].rank_gates(), gates, strict=True))
    assert model[1].rank_gate_0.eq(0.5).all()


def test_frozen_removed_and_one_core_layers_stay_without():
    model = nn.ModuleList(
        [
            TTLinear(12, 20),
            TTLinear(12, 20).requires_grad_(False),
            TTLinear(12, 20, ranks=[0] * 5),
            TTMEmbedding(5, 7, in_factors=(5,), out_factors=(7,)),
        ]
    )
    add_rank_gates(model)
    assert [len(module.rank_gates()) for module in model] == [5, 0, 0, 0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(nn.Linear(3, 3), "Linear has no layer in tensor-train form. Make it with", id="dense"),
        pytest.param(
            small_model(False).requires_grad_(False), "has no such layer with ranks and trainable", id="frozen"
        ),
        pytest.param(TTLinear(12, 20, ranks=[0] * 5), "have been removed: no rank is left", id="removed"),
        pytest.param(TTMEmbedding(5, 7, in_factors=(5,), out_factors=(7,)), "no such layer", id="one-core"),
    ],
)
def test_models_without_ranks_to_train_are_named(model, message):
    with pytest.raises(ValueError, match=message):
        add_rank_gates(model)


@every_optimizer
def test_optimizers_made_after_the_gates_pass(make):
    model = small_model()
    check_gates(model, make(model))


@pytest.mark.parametrize(
    ("model", "make", "message"),
    [
        pytest.param(nn.Linear(3, 3), OPTIMIZERS["sgd"], "Linear has no trainable rank gates", id="dense"),
        pytest.param(small_model(False), OPTIMIZERS["sgd"], r"Call hf_comera\.add_rank_gates\(model\)", id="no-gates"),
        pytest.param(
            small_model(),
            lambda model: SGD([p for p in model.parameters() if p is not model[1].rank_gate_2], lr=1.0),
            r"does not hold 1\.rank_gate_2\. Make it after the gates",
            id="missing",
        ),
        pytest.param(
            small_model(),
            lambda model: SGD([p for p in model.parameters() if p is not model[1].core_2], lr=1.0),
            r"does not hold 1\.core_2, whose moments",
            id="missing-core",
        ),
        pytest.param(
            frozen_since(small_model()),
            OPTIMIZERS["sgd"],
            r"0\.core_1 is frozen, but its layer has trainable rank gates",
            id="frozen-core",
        ),
        pytest.param(
            small_model(),
            lambda model: SGD(
                [{"params": [*part.parameters()], "lr": lr} for part, lr in zip(model, (1.0, 0.5), strict=False)]
            ),
            r"several learning rates \(0\.rank_gate_0 1, 1\.rank_gate_0 0\.5\)",
            id="several-rates",
        ),
        pytest.param(
            small_model(),
            lambda model: AdamW(model.parameters(), weight_decay=0.01),
            r"decays 0\.rank_gate_0 \(weight_decay=0\.01\)",
            id="decayed",
        ),
    ],
)
def test_optimizers_that_spoil_gates_are_named(model, make, message):
    with pytest.raises(ValueError, match=message):
        check_gates(model, make(model))


@every_optimizer
def test_folding_takes_gates_out_of_the_optimizer(make):
    model = small_model()
    optimizer = make(model)
    for _ in range(3):
        step(model, optimizer)
    expected = model(torch.arange(9))
    states = {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if "gate" not in name}
    fold_rank_gates(model, optimizer)
    torch.testing.assert_close(model(torch.arange(9)), expected)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    assert {id(parameter) for parameter in optimizer.state} == set(held)
    for name, parameter in model.named_parameters():
        assert all(optimizer.state[parameter][key] is value for key, value in states[name].items())
    for group in optimizer.param_groups:
        assert all(len(group[key]) == len(group["params"]) for key in {"names", "param_names"} & group.keys())
    before = model[1].core_2.detach().clone()
    step(model, optimizer)
    assert not torch.equal(model[1].core_2, before)


@pytest.mark.parametrize(
    "groups", [lambda m, **s: comera_param_groups(m, **s), lambda m, **s: TTMuon(m, **s).param_groups]
)
@pytest.mark.parametrize(("gate_lr", "rate"), [(None, 0.02), (0.3, 0.3)])
def test_gates_have_a_group_without_decay_and_their_own_rate(groups, gate_lr, rate):
    model = small_model()
    groups = [g for g in groups(model, lr=0.02, weight_decay=0.1, gate_lr=gate_lr) if g["group_name"] == "rank gates"]
    names = [f"0.rank_gate_{k}" for k in range(3)] + [f"1.rank_gate_{k}" for k in range(5)]
    assert [(group["names"], group["lr"], group["weight_decay"]) for group in groups] == [(names, rate, 0.0)]


@pytest.mark.parametrize("make", [TTMuon, comera_param_groups])
@pytest.mark.parametrize("gate_lr", [0.0, -1.0, float("nan")])
def test_bad_rates_of_gates_are_named(make, gate_lr):
    with pytest.raises(ValueError, match=rf"gate_lr={gate_lr} must be positive, for example gate_lr=0\.001"):
        make(small_model(), lr=1e-3, gate_lr=gate_lr)


@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], OPTIMIZERS["tt-muon"]], ids=["adamw", "tt-muon"])
def test_optimizers_of_models_with_a_removed_layer_hold_the_rest(make):
    model = small_model()
    cut_ranks({"1": model[1]}, {"1": [torch.arange(0)] * 5})
    held = [id(parameter) for group in make(model).param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters() if parameter.numel())


def test_the_rate_of_a_gate_follows_its_group():
    model = small_model()
    optimizer = TTMuon(model, lr=1e-3, gate_lr=0.3)
    gate = model[1].rank_gate_3
    assert gate_rate(optimizer, gate) == 0.3
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    assert gate_rate(optimizer, gate) == 0.15


def test_gates_move_with_tt_muon():
    model = small_model()
    optimizer = TTMuon(model, lr=1e-3, gate_lr=0.01)
    step(model, optimizer)
    moved = torch.cat([gate - 1 for gate in model[1].rank_gates()]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-2, atol=0)  # AdamW's first step


def test_the_bare_model_is_inside_torch_compile():
    model = small_model()
    assert bare_model(model) is model
    assert bare_model(torch.compile(model, backend="eager")) is model


def test_data_parallel_is_refused():
    with pytest.raises(ValueError, match=r"nn\.DataParallel.*one process a GPU"):
        bare_model(nn.DataParallel(small_model()))
