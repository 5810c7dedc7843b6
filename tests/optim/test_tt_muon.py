"""hf_comera/optim/tt_muon.py: equal steps for every direction of the matrix, whatever the cores look like."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_comera import ComeraConfig, TTMuon, get_comera_model
from hf_comera.modules import TTLinear
from hf_comera.optim.tt_muon import COHERENCE, orthogonalize
from tests.architectures import every_architecture
from tests.ops.float32_settings import SETTINGS, choose

aten = torch.ops.aten


def layer(in_features=12, out_features=20, order=2, ranks=3, **settings):
    torch.manual_seed(0)
    return TTLinear(
        in_features,
        out_features,
        in_factors={1: [12], 2: [4, 3], 3: [3, 2, 2]}[order],
        out_factors={1: [20], 2: [4, 5], 3: [2, 2, 5]}[order],
        ranks=ranks,
        dtype=torch.float64,
        **settings,
    )


def update_of(module, gradient, steps=1, **settings):
    """What ``steps`` steps under the loss ``<W, gradient>`` add to the implied matrix."""
    before = module.dense().detach().clone()
    optimizer = TTMuon(module, **{"lr": 1e-6, "weight_decay": 0.0, **settings})
    for _ in range(steps):
        optimizer.zero_grad()
        (module.dense() * gradient).sum().backward()
        optimizer.step()
    return module.dense().detach() - before


@pytest.mark.parametrize(("rows", "columns"), [(12, 12), (12, 20), (20, 12)])
@pytest.mark.parametrize("order", [1, 2])
def test_at_full_rank_it_is_muon_on_the_dense_matrix(rows, columns, order):
    torch.manual_seed(0)
    factors = {12: [[12], [4, 3]], 20: [[20], [4, 5]]}
    in_factors, out_factors = factors[columns][order - 1], factors[rows][order - 1]
    module = TTLinear(
        columns, rows, in_factors=in_factors, out_factors=out_factors[::-1], ranks=100, dtype=torch.float64
    )
    gradient = torch.randn(rows, columns, dtype=torch.float64)
    update = update_of(module, gradient)
    expected = -1e-6 * COHERENCE * (rows * columns) ** 0.5 * orthogonalize(gradient)
    torch.testing.assert_close(update, expected, atol=2e-3 * expected.norm().item(), rtol=0)


@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_no_two_cores_move_the_matrix_alike(order, ranks, monkeypatch):
    monkeypatch.setattr("hf_comera.tt.gauge.DAMPING", 0.0)
    module = layer(order=order, ranks=ranks, bias=False)
    before = copy.deepcopy(module)
    update_of(module, torch.randn(20, 12, dtype=torch.float64))
    moved = []
    for place, core in enumerate(module.cores()):
        alone = copy.deepcopy(before)
        alone.cores()[place].data = core.detach() - before.cores()[place].detach()
        moved.append(alone.dense().detach().flatten())
    overlap = torch.stack(moved) @ torch.stack(moved).T
    assert overlap.diagonal().max() > 0
    assert (overlap - overlap.diag().diag()).abs().max() < 1e-6 * overlap.diagonal().max()


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_scale_and_basis_between_cores_do_not_matter(order, monkeypatch):
    monkeypatch.setattr("hf_comera.tt.gauge.DAMPING", 0.0)
    module, gradient = layer(order=order), torch.randn(20, 12, dtype=torch.float64)
    other, basis = copy.deepcopy(module), None
    for place, core in enumerate(module.cores()):
        changed = core.detach() if basis is None else torch.tensordot(torch.linalg.inv(basis), core.detach(), 1)
        rank = core.shape[-1]
        basis = 3.0 * torch.eye(rank, dtype=torch.float64) + torch.randn(rank, rank, dtype=torch.float64)
        if place + 1 < module.num_cores:
            changed = torch.tensordot(changed, basis, 1)
        getattr(other, f"core_{place}").data = changed
    torch.testing.assert_close(other.dense(), module.dense())
    ours, theirs = update_of(module, gradient), update_of(other, gradient)
    torch.testing.assert_close(ours, theirs, atol=1e-5 * ours.abs().max().item(), rtol=1e-4)


def test_the_scale_of_the_gradient_does_not_matter():
    gradient = torch.randn(20, 12, dtype=torch.float64)
    once = update_of(layer(), gradient, steps=3, lr=1e-3)
    torch.testing.assert_close(update_of(layer(), 1e-4 * gradient, steps=3, lr=1e-3), once)


@pytest.mark.parametrize(("agree", "expected"), [(True, 1.0), (False, (0.1 / 1.9) ** 0.5)])
def test_steps_shrink_where_gradients_disagree(agree, expected):
    module, steps = layer(order=2), 400
    optimizer = TTMuon(module, lr=1e-9, weight_decay=0.0)
    optimizer.zero_grad()
    lengths, generator = [], torch.Generator().manual_seed(0)
    gradient = torch.randn(20, 12, dtype=torch.float64)
    for _ in range(steps):
        before = module.dense().detach()
        module.zero_grad()
        if not agree:
            gradient = torch.randn(20, 12, dtype=torch.float64, generator=generator)
        (module.dense() * gradient).sum().backward()
        optimizer.step()
        lengths.append(torch.linalg.matrix_norm(module.dense().detach() - before, 2).item())
    assert sum(lengths[100:]) / (steps - 100) / lengths[0] == pytest.approx(expected, rel=0.15)


def test_it_descends():
    gradient = torch.randn(20, 12, dtype=torch.float64)
    for order in (1, 2, 3):
        assert (update_of(layer(order=order), gradient) * gradient).sum() < 0


def test_decay_shrinks_the_matrix_as_if_it_were_dense():
    module = layer(order=3)
    before = module.dense().detach()
    module.bias.grad = torch.zeros_like(module.bias)
    optimizer = TTMuon(module, lr=0.01, weight_decay=0.1)
    for core in module.cores():
        core.grad = torch.zeros_like(core)
    optimizer.step()
    torch.testing.assert_close(module.dense(), before * (1 - 0.01 * 0.1), rtol=1e-6, atol=0)


def test_other_parameters_are_trained_as_by_adamw():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))

    ours, theirs = model(), model()
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizers = TTMuon(ours, lr=0.01, weight_decay=0.1), torch.optim.AdamW(groups, lr=0.01, fused=True)
    for _ in range(4):
        x = torch.randn(8, 4)
        for network, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_equal_layers_are_stepped_together_as_they_would_be_alone():
    def layers():
        torch.manual_seed(0)
        return nn.ModuleList([TTLinear(12, 12, ranks=4), TTLinear(12, 20, ranks=4), TTLinear(12, 12, ranks=4)])

    torch.manual_seed(1)
    gradients = [torch.randn_like(module.dense()) for module in layers()]
    together, alone = layers(), layers()
    sum((m.dense() * g).sum() for m, g in zip(together, gradients, strict=True)).backward()
    TTMuon(together, lr=1e-2).step()
    for module, gradient in zip(alone, gradients, strict=True):
        (module.dense() * gradient).sum().backward()
        TTMuon(module, lr=1e-2).step()
    for mine, reference in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)


@every_architecture
def test_every_architecture_trains(architecture):
    torch.manual_seed(0)
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    inputs = architecture.training_inputs()
    optimizer = TTMuon(model.eval(), lr=2e-3)
    losses = []
    for _ in range(8):
        loss = model(**inputs).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("setting", SETTINGS)
def test_autocast_and_reduced_precision_do_not_reach_the_steps(setting):
    def stepped(setting, autocast):
        torch.manual_seed(0)
        module = TTLinear(48, 60, ranks=8)
        module(torch.randn(8, 48)).square().sum().backward()
        choose(setting)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), PrecisionOfProducts() as products:
            TTMuon(module, lr=1e-2).step()
        assert products.found
        assert products.found <= {("ieee", "ieee"), ("ieee", "none"), ("none", "ieee"), ("none", "none")}
        return module

    expected = stepped("none", False)
    assert all(map(torch.equal, stepped(setting, True).parameters(), expected.parameters()))


class PrecisionOfProducts(TorchDispatchMode):
    """What each product of matrices could be made of, on a GPU and on a CPU."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
            backends = torch.backends
            self.found.add((backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision))
        return func(*args, **(kwargs or {}))


def test_bfloat16_weights():
    module = TTLinear(12, 20, ranks=4, dtype=torch.bfloat16)
    before = module.dense().detach().clone()
    module(torch.randn(3, 12, dtype=torch.bfloat16)).sum().backward()
    TTMuon(module, lr=1e-1).step()
    assert module.dense().isfinite().all()
    assert not torch.equal(module.dense(), before)


def test_closure_is_evaluated():
    module = layer()
    optimizer = TTMuon(module, lr=1e-3)

    def closure():
        optimizer.zero_grad()
        loss = module(torch.ones(1, 12, dtype=torch.float64)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr=0.0 must be positive"),
        ({"lr": math.inf}, r"lr=inf must be finite, for example lr=0\.001"),
        ({"lr": math.nan}, r"lr=nan must be finite, for example lr=0\.001"),
        ({"lr": -1.0}, r"lr=-1\.0 must not be negative"),
        ({"gate_lr": math.inf}, r"gate_lr=inf must be finite, for example gate_lr=0\.001"),
        ({"weight_decay": math.nan}, r"weight_decay=nan must be finite, for example weight_decay=0\.01"),
        ({"eps": math.inf}, r"eps=inf must be finite, for example eps=1e-08"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0 must be"),
        ({"betas": (0.9, 1.5)}, r"betas\[1\]=1.5 must be"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TTMuon(layer(), **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [2.0**50, 2.0**66, 2.0**100, 2.0**120])
def test_large_gradients_are_steps_as_any(scale, dtype):
    torch.manual_seed(0)
    module = nn.ModuleList([TTLinear(12, 20, ranks=4, bias=False), TTLinear(12, 20, ranks=3)]).to(dtype)
    gradients = [torch.randn_like(parameter) for parameter in module.parameters()]

    def stepped(*scales):
        trained = copy.deepcopy(module)
        optimizer = TTMuon(trained, lr=1e-2)
        for each in scales:
            for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
                parameter.grad = each * gradient
            optimizer.step()
        return dict(trained.named_parameters())

    expected = stepped(1.0, 1.0)
    for name, found in stepped(scale, scale).items():
        if "core" in name:
            torch.testing.assert_close(
                found, expected[name], rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5
            )
    assert all(found.isfinite().all() for found in stepped(1.0, scale, 1.0, 1e-3).values())
