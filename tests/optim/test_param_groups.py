"""hf_comera/optim/param_groups.py: every trainable parameter in one group, with the rate and decay of its kind."""

import pytest

from hf_comera import ComeraConfig, comera_param_groups, get_comera_model
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
    groups = comera_param_groups(model, lr=1e-3, weight_decay=0.12, core_lr_scale=0.5)
    seen = {(g["group_name"], g["lr"], round(g["weight_decay"], 6)) for g in groups}
    assert seen == {
        ("cores", 5e-4, 0.02),  # linears: six cores share the decay
        ("cores", 5e-4, 0.03),  # the embedding: four
        ("weights", 1e-3, 0.12),
        ("biases and norms", 1e-3, 0.0),
    }
    names = {name: g["group_name"] for g in groups for name in g["names"]}
    assert names["bert.encoder.layer.0.attention.self.query.core_3"] == "cores"
    assert names["bert.encoder.layer.0.attention.self.query.bias"] == "biases and norms"
    assert names["bert.embeddings.position_embeddings.weight"] == "weights"
    assert names["bert.encoder.layer.0.output.LayerNorm.weight"] == "biases and norms"


def test_a_dense_model_is_grouped_too():
    groups = comera_param_groups(ARCHITECTURES["gpt2"].new_model(), lr=1e-3)
    assert {g["group_name"] for g in groups} == {"weights", "biases and norms"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr=0.0 must be positive"),
        ({"lr": 1e-3, "weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"lr": 1e-3, "core_lr_scale": 0}, "core_lr_scale=0 must"),
    ],
)
def test_bad_values_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        comera_param_groups(ARCHITECTURES["gpt2"].new_model(), **settings)
