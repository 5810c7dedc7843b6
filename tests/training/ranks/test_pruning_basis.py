"""Changing the basis of layers in training: same outputs, same steps."""

import copy

import pytest
import torch

from hf_comera import CoatAdamW, TTMuon, comera_param_groups
from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.training.ranks.pruning import to_canonical_basis

OPTIMIZERS = {
    "sgd": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9),
    "adamw": lambda layer: torch.optim.AdamW(comera_param_groups(layer, 1e-2)),
    "coat": lambda layer: CoatAdamW(comera_param_groups(layer, 1e-2)),
    "tt_muon": lambda layer: TTMuon(layer, 1e-2),
    "rmsprop": lambda layer: torch.optim.RMSprop(layer.parameters(), lr=1e-3, momentum=0.9),
}


def trained(make, optimizer):
    """A layer with uneven gates after two steps, and its optimizer."""
    layer = make()
    layer.add_rank_gates()
    for gate in layer.rank_gates():
        gate.data.uniform_(0.3, 1.2)
    optimizer = OPTIMIZERS[optimizer](layer)
    for _ in range(2):
        step(layer, optimizer)
    return layer, optimizer


def step(layer, optimizer):
    (layer.dense() * target(layer)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def target(layer):
    return torch.randn(layer.weight_shape(), dtype=torch.float64, generator=torch.Generator().manual_seed(7))


LAYERS = {
    "linear": lambda: TTLinear(24, 30, ranks=5, dtype=torch.float64),
    "embedding": lambda: TTMEmbedding(60, 16, ranks=4, dtype=torch.float64),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_what_a_layer_computes_stays_and_gates_are_folded(make, optimizer):
    layer, optimizer = trained(make, optimizer)
    before, cores = layer.dense().detach(), layer.cores()
    spectra = to_canonical_basis({"layer": layer}, optimizer)
    torch.testing.assert_close(layer.dense().detach(), before)
    assert [len(values) for values in spectra] == list(layer.ranks)
    assert all((gate == 1).all() for gate in layer.rank_gates())
    assert all(new is old for new, old in zip(layer.cores(), cores, strict=True))  # optimizers hold them


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_momentum_means_the_same_change_of_the_loss(make):
    """The momentum is a gradient: what it says of any direction in which the implied matrix can move stays true."""
    layer, optimizer = trained(make, "sgd")
    old = copy.deepcopy(layer)
    momenta = [optimizer.state[core]["momentum_buffer"].clone() for core in layer.cores()]
    to_canonical_basis({"layer": layer}, optimizer)
    new_momenta = [optimizer.state[core]["momentum_buffer"] for core in layer.cores()]
    # along the cores themselves (each scaled on its own), where both bases can be compared
    folded = [core.detach() for core in old.gated_cores()]
    for place, (core, gated) in enumerate(zip(layer.cores(), folded, strict=True)):
        gate = old.rank_gates()[place] if place < old.num_cores - 1 else torch.ones(1, dtype=torch.float64)
        before = (momenta[place] / gate * gated).sum()
        torch.testing.assert_close((new_momenta[place] * core).sum().detach(), before.detach())


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_the_momentum_of_rmsprop_means_the_same_step(make):
    """Its momentum is a step: the implied matrix moves as far along it as before, however uneven the cores are."""
    layer, optimizer = trained(make, "rmsprop")
    gate = layer.rank_gates()[0]
    gate.data.copy_(torch.linspace(0.01, 3, gate.numel()))
    before = step_of_momentum(layer, optimizer)
    to_canonical_basis({"layer": layer}, optimizer)
    torch.testing.assert_close(step_of_momentum(layer, optimizer), before)


@torch.no_grad()
def step_of_momentum(layer, optimizer):
    """The derivative of the implied matrix along the momentum of the cores: it is linear in each of them."""
    total = torch.zeros(layer.weight_shape(), dtype=torch.float64)
    for core in layer.cores():
        kept = core.clone()
        core.copy_(optimizer.state[core]["momentum_buffer"])
        total += layer.dense()
        core.copy_(kept)
    return total


def test_gradients_move_as_the_momentum_does():
    """With a constant gradient the momentum after the change is what the new gradient says."""
    layer, optimizer = trained(LAYERS["linear"], "sgd")
    (layer.dense() * target(layer)).sum().backward()
    for core in layer.cores():
        optimizer.state[core]["momentum_buffer"].copy_(core.grad)
    to_canonical_basis({"layer": layer}, optimizer)
    optimizer.zero_grad()
    (layer.dense() * target(layer)).sum().backward()
    for core in layer.cores():
        torch.testing.assert_close(optimizer.state[core]["momentum_buffer"], core.grad)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_averages_of_parameters_move_as_the_parameters_do(make):
    layer, _ = trained(make, "sgd")
    optimizer = torch.optim.ASGD(layer.parameters(), t0=0)
    step(layer, optimizer)
    for parameter in layer.tt_parameters():
        optimizer.state[parameter]["ax"].copy_(parameter)
    to_canonical_basis({"layer": layer}, optimizer)
    for parameter in layer.tt_parameters():
        torch.testing.assert_close(optimizer.state[parameter]["ax"], parameter.detach())


@pytest.mark.parametrize(
    ("optimizer", "key"), [("Adamax", "exp_inf"), ("Rprop", "step_size"), ("Adadelta", "acc_delta")]
)
def test_sizes_stay_positive_and_move_with_a_scale_as_they_should(optimizer, key):
    """Entries of a bond of rank one change their scale and nothing else, so that sizes are known exactly."""
    layer = TTLinear(6, 10, ranks=1, dtype=torch.float64)
    layer.add_rank_gates()
    optimizer = getattr(torch.optim, optimizer)(layer.parameters(), lr=1e-3)
    step(layer, optimizer)
    old = {core: (core.detach().clone(), optimizer.state[core][key].clone()) for core in layer.cores()}
    to_canonical_basis({"layer": layer}, optimizer)
    for core, (before, value) in old.items():
        scale = (core.norm() / before.norm()).detach()  # gradients grow as the core shrinks, steps with it
        expected = {"exp_inf": value / scale, "step_size": value * scale, "acc_delta": value * scale**2}[key]
        torch.testing.assert_close(optimizer.state[core][key], expected)


def test_second_moments_stay_positive_and_finite_also_with_gates_of_zero():
    layer, optimizer = trained(LAYERS["linear"], "adamw")
    layer.rank_gate_1.data[1] = 0
    to_canonical_basis({"layer": layer}, optimizer)
    for parameter in (*layer.cores(), *layer.rank_gates()):
        state = optimizer.state[parameter]
        assert (state["exp_avg_sq"] >= 0).all()
        assert state["exp_avg_sq"].isfinite().all()
        assert state["exp_avg"].isfinite().all()
    step(layer, optimizer)
    assert layer.dense().isfinite().all()


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layers_in_sixteen_bits_change_by_their_rounding(make):
    layer = make().bfloat16()
    layer.add_rank_gates()
    optimizer, before = torch.optim.SGD(layer.parameters()), layer.dense().double()
    to_canonical_basis({"": layer}, optimizer)
    assert (layer.dense().double() - before).norm() <= 0.01 * before.norm()
