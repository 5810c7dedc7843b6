"""hf_comera/optim/param_groups.py: every trainable parameter in one group, with the rate and decay of its kind."""

import copy
import math

import pytest
import torch
from torch import nn

from hf_comera import ComeraConfig, comera_param_groups, get_comera_model
from hf_comera.modules import TTLinear
from hf_comera.tt.shapes import factorize
from tests.architectures import ARCHITECTURES, every_architecture


@every_architecture
def test_groups_cover_every_trainable_parameter_once(architecture):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    frozen = next(iter(model.parameters())).requires_grad_(False)
    grouped = [id(p) for group in comera_param_groups(model, lr=1e-3) for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters()} - {id(frozen)}


def test_rates_and_decay():
    architecture = ARCHITECTURES["bert-mlm"]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    groups = comera_param_groups(model, lr=1e-3, weight_decay=0.12)
    seen = {(g["group_name"], g["lr"], g["weight_decay"]) for g in groups if g["group_name"] != "cores"}
    assert seen == {("weights", 1e-3, 0.12), ("biases and norms", 1e-3, 0.0)}
    assert len(groups) < 15  # layers of equal shapes share theirs
    names = {name: g["group_name"] for g in groups for name in g["names"]}
    assert names["bert.encoder.layer.0.attention.self.query.core_3"] == "cores"
    assert names["bert.encoder.layer.0.attention.self.query.bias"] == "biases and norms"
    assert names["bert.embeddings.position_embeddings.weight"] == "weights"
    assert names["bert.encoder.layer.0.output.LayerNorm.weight"] == "biases and norms"


@pytest.mark.parametrize("order", [1, 2, 3])
def test_all_cores_move_the_matrix_equally_and_shrink_it_as_asked(order):
    torch.manual_seed(0)
    factors = {"in_factors": factorize(24, order), "out_factors": factorize(60, order)}
    layer = TTLinear(24, 60, ranks=5, bias=False, dtype=torch.float64, **factors)
    groups = comera_param_groups(layer, lr=1e-3, weight_decay=0.12)
    rates = {name: group for group in groups for name in group["names"]}
    for name, core in layer.named_parameters():
        changed = copy.deepcopy(layer)
        unit = torch.ones_like(core) * rates[name]["lr"]  # all entries agree: the longest step
        getattr(changed, name).data = unit
        longest = 1e-3 * math.sqrt(24 * 60 / (2 * order))
        assert torch.linalg.matrix_norm(changed.dense(), 2) < 1.13 * longest
        assert rates[name]["lr"] * rates[name]["weight_decay"] == pytest.approx(1e-3 * 0.12 / (2 * order), rel=0.1)


def test_rates_follow_the_scale_of_the_layer():
    small, large = TTLinear(24, 60, ranks=5), TTLinear(24, 60, ranks=5)
    small.reset_parameters(0.01)
    large.reset_parameters(0.64)
    rates = [comera_param_groups(layer, lr=1e-3)[0]["lr"] for layer in (small, large)]
    assert rates[0] == pytest.approx(rates[1] * 64 ** (5 / 6), rel=0.26)  # the other five cores grew by 64 ** (1 / 6)


def test_layers_on_the_meta_device_are_an_error():
    with pytest.raises(ValueError, match="'0' are on the meta device"):
        comera_param_groups(nn.Sequential(TTLinear(24, 60, device="meta")), lr=1e-3)


def test_a_core_of_zeros_does_not_break_the_rates_of_the_others():
    layer = TTLinear(24, 60, ranks=5)
    layer.core_5.data.zero_()
    assert all(math.isfinite(group["lr"]) for group in comera_param_groups(layer, lr=1e-3))


def test_a_dense_model_is_grouped_too():
    groups = comera_param_groups(ARCHITECTURES["gpt2"].new_model(), lr=1e-3)
    assert {g["group_name"] for g in groups} == {"weights", "biases and norms"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr=0.0 must be positive"),
        ({"lr": math.inf}, r"lr=inf must be finite, for example lr=0\.001"),
        ({"lr": math.nan}, r"lr=nan must be finite, for example lr=0\.001"),
        ({"lr": -1.0}, r"lr=-1\.0 must not be negative"),
        ({"lr": 1e-3, "gate_lr": math.inf}, r"gate_lr=inf must be finite, for example gate_lr=0\.001"),
        ({"lr": 1e-3, "weight_decay": math.nan}, r"weight_decay=nan must be finite, for example weight_decay=0\.01"),
        ({"lr": 1e-3, "weight_decay": -1.0}, "weight_decay=-1.0"),
    ],
)
def test_bad_values_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        comera_param_groups(ARCHITECTURES["gpt2"].new_model(), **settings)
