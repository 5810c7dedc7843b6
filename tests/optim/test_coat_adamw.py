"""hf_comera/optim/coat_adamw.py: AdamW's steps from moments of two bytes, whatever goes together."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW

from hf_comera import ComeraConfig, comera_param_groups, get_comera_model
from hf_comera.modules import TTLinear
from hf_comera.optim import coat_adamw
from hf_comera.optim.coat_adamw import CoatAdamW
from tests.architectures import ARCHITECTURES


def network(dtype=torch.float32):
    """With rows of 200, of 256 and of 7 entries."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 256), nn.GELU(), nn.Linear(256, 7), nn.GELU(), nn.Linear(7, 10)).to(dtype)


def train(model, optimizer, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        inputs = torch.randn(32, 200, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs.to(model[0].weight.dtype)) - inputs[:, :10].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def unquantised(monkeypatch):
    """Moments that stay as they are."""

    def new_state(parameter, layout):
        moments = {key: torch.zeros_like(parameter) for key in coat_adamw.MOMENTS}
        return {"step": torch.zeros(()), **moments}

    monkeypatch.setattr(coat_adamw, "new_state", new_state)
    monkeypatch.setattr(coat_adamw, "load_moment", lambda flat, key, states: flat.gather([s[key] for s in states]))
    monkeypatch.setattr(
        coat_adamw, "store_moment", lambda flat, key, groups, states: flat.scatter(groups, [s[key] for s in states])
    )


SETTINGS = {
    "defaults": {},
    "decay": {"weight_decay": 0.3, "lr": 3e-2},
    "betas": {"betas": (0.8, 0.95), "eps": 1e-3},
    "no-memory": {"betas": (0.0, 0.0)},
    "rate-in-a-tensor": {"lr": torch.tensor(1e-2)},
}


@pytest.mark.usefixtures("unquantised")
@pytest.mark.parametrize("entries", [2**18, 1000])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_without_quantisation_it_is_adamw(settings, entries, monkeypatch):
    monkeypatch.setattr(coat_adamw, "entries_at_once", lambda device: entries)
    ours, theirs = network(torch.float64), network(torch.float64)
    train(ours, CoatAdamW(ours.parameters(), **settings), 5)
    train(theirs, AdamW(theirs.parameters(), **settings, foreach=False), 5)
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("entries", [1000, 2**14])
def test_how_many_entries_go_together_does_not_matter(entries, monkeypatch):
    expected, model = network(), network()
    train(expected, CoatAdamW(expected.parameters()), 3)
    monkeypatch.setattr(coat_adamw, "entries_at_once", lambda device: entries)
    train(model, CoatAdamW(model.parameters()), 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_as_adamw_does(dtype):
    ours, theirs = network(dtype), network()
    found = train(ours, CoatAdamW(ours.parameters(), lr=3e-3), 120)
    expected = train(theirs, AdamW(theirs.parameters(), lr=3e-3), 120)
    assert sum(expected[-10:]) < 0.8 * sum(expected[:10])
    assert abs(sum(found[-10:]) / sum(expected[-10:]) - 1) < 0.03


def test_a_compressed_model_learns_as_with_adamw():
    losses = {}
    for make in (CoatAdamW, AdamW):
        architecture = ARCHITECTURES["gpt2"]
        torch.manual_seed(0)
        model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
        optimizer = make(comera_param_groups(model.eval(), lr=3e-3))
        ids = torch.randint(2, 200, (4, 9), generator=torch.Generator().manual_seed(1))
        of_steps = losses.setdefault(make, [])
        for _ in range(40):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            of_steps.append(loss.item())
    assert losses[AdamW][-1] < 0.7 * losses[AdamW][0]
    assert abs(sum(losses[CoatAdamW]) / sum(losses[AdamW]) - 1) < 0.02


def test_parameters_without_gradient_stay_and_start_late():
    model = network()
    optimizer = CoatAdamW(model.parameters(), lr=1e-2)
    model[2].requires_grad_(False)
    train(model, optimizer, 2)
    assert model[2].weight not in optimizer.state
    model[2].requires_grad_(True)
    before = model[2].weight.detach().clone()
    train(model, optimizer, 1)
    assert [optimizer.state[p]["step"].item() for p in (model[0].weight, model[2].weight)] == [3, 1]
    # the first step is one of the sign of the gradient
    torch.testing.assert_close((before * (1 - 1e-4) - model[2].weight).abs().median().item(), 1e-2, rtol=1e-3, atol=0)


def test_a_step_reads_nothing_from_the_device():
    """Of tensors without values nothing can be read."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(shape)) for shape in ((8, 200), (3, 9), (5,))]
        optimizer = CoatAdamW(parameters)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()


@pytest.mark.parametrize("shape", [(33, 200), (20, 96), (6, 1)])
def test_a_step_of_half_the_rows_is_half_the_step(shape):
    """To the bit, so that sharding changes nothing."""
    whole = nn.Parameter(torch.randn(shape))
    halves = [nn.Parameter(part.clone()) for part in whole.detach().chunk(2)]
    optimizers = [CoatAdamW([whole])] + [CoatAdamW([half]) for half in halves]
    for _ in range(10):
        whole.grad = torch.randn(shape)
        for half, gradient in zip(halves, whole.grad.chunk(2), strict=True):
            half.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat(halves), whole)


def test_transposed_and_empty_parameters():
    weight = nn.Parameter(torch.randn(40, 30).t())
    twin = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    empty = nn.Parameter(torch.randn(0, 9))
    for parameter in (weight, twin, empty):
        parameter.grad = torch.ones_like(parameter) * 0.1
    CoatAdamW([weight, twin, empty]).step()
    assert torch.equal(weight, twin)


def test_zero_gradients_move_nothing():
    model = network()
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    CoatAdamW(model.parameters(), weight_decay=0.0).step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_entries_whose_gradient_ended_stop():
    parameter = nn.Parameter(torch.zeros(2, 64))
    optimizer = CoatAdamW([parameter], weight_decay=0.0)
    noise = torch.Generator().manual_seed(0)
    for step in range(600):
        parameter.grad = torch.randn(2, 64, generator=noise)
        if step >= 20:
            parameter.grad[:, :5] = 0
        if step == 500:
            before = parameter.detach().clone()
        optimizer.step()
    assert torch.equal(parameter[:, :5], before[:, :5])
    assert parameter.isfinite().all()


def test_cores_and_gates_are_quantised_but_not_the_shortest():
    layer = TTLinear(48, 120, in_factors=[8, 6], out_factors=[12, 10], ranks=[8, 8, 6])
    layer.add_rank_gates()
    optimizer = CoatAdamW(comera_param_groups(layer, lr=1e-3))
    layer(torch.randn(4, 48)).square().sum().backward()
    optimizer.step()
    dtypes = [[optimizer.state[p]["exp_avg"].dtype for p in part] for part in (layer.cores(), layer.rank_gates())]
    assert dtypes == [[torch.uint8] * 4, [torch.uint8, torch.uint8, torch.float32]]


FAULTS = {
    "rate": ({"lr": -1.0}, r"lr=-1\.0 must not be negative"),
    "beta": ({"betas": (0.9, 1.0)}, r"betas\[1\]=1\.0 must be at least 0"),
    "infinite-rate": ({"lr": math.inf}, r"lr=inf must be finite, for example lr=0\.001"),
    "no-rate": ({"lr": math.nan}, r"lr=nan must be finite, for example lr=0\.001"),
    "infinite-decay": ({"weight_decay": math.inf}, r"weight_decay=inf must be finite, for example weight_decay=0\.01"),
    "eps": ({"eps": -1e-8}, r"eps=-1e-08 must not be negative"),
    "decay": ({"weight_decay": -0.1}, r"weight_decay=-0\.1 must not be negative"),
}


@pytest.mark.parametrize(("settings", "message"), FAULTS.values(), ids=FAULTS)
def test_faults_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CoatAdamW(network().parameters(), **settings)
    optimizer = CoatAdamW(network().parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **settings})
    assert len(optimizer.param_groups) == 1


def test_a_rate_that_no_group_uses_is_refused_too():
    groups = [{"params": [nn.Parameter(torch.zeros(3))], "lr": 1e-3}]
    with pytest.raises(ValueError, match=r"lr=-1 must not be negative, for example lr=0\.001"):
        CoatAdamW(groups, lr=-1)


def test_sparse_gradients_and_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="which is real"):
        CoatAdamW([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    embedding = nn.Embedding(10, 8, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        CoatAdamW(embedding.parameters()).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e15, 1e20, 1e30, 3e38])
def test_large_gradients_are_steps_as_any(scale, dtype):
    model = network(dtype)
    optimizer = CoatAdamW(model.parameters(), lr=1e-3)
    for each in (1.0, scale, 1.0, scale, 1e-3):
        before = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.grad = each * torch.rand_like(parameter)
        optimizer.step()
        for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
            assert (parameter - old).abs().max() < 0.05


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_entry_and_shows(value):
    parameter = nn.Parameter(torch.ones(4, 200))
    optimizer = CoatAdamW([parameter], lr=1e-3)
    parameter.grad = torch.ones(4, 200)
    parameter.grad[1, 7] = value
    optimizer.step()
    assert parameter.isnan().sum() == 1
    assert parameter[1, 7].isnan()
