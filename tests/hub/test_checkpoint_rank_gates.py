"""hf_comera/hub/quantizer.py: checkpoints of models whose ranks are being trained, or that have removed layers."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from hf_comera import ComeraConfig, get_comera_model, is_comera_model
from hf_comera.modules import TTLinear
from hf_comera.training.ranks.gates import add_rank_gates, fold_rank_gates
from hf_comera.training.ranks.pruning import cut_ranks
from tests.architectures import ARCHITECTURES, every_architecture

NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
QUERY = "bert.encoder.layer.0.attention.self.query"


def new_model(architecture, gates=True, removed=True, **settings):
    """A model with random gates, of which the first linear layer is removed."""
    config = ComeraConfig(rank=4, **settings)
    model = get_comera_model(architecture.auto_class, config, config=architecture.new_config()).eval()
    if gates:
        add_rank_gates(model)
        for name, parameter in model.named_parameters():
            if "rank_gate_" in name:
                parameter.data.uniform_(0.5, 1.5)
    if removed:
        name = first_linear(model)
        cut_ranks({name: model.get_submodule(name)}, {name: [torch.arange(0)] * 5})
    return model


def first_linear(model):
    return next(name for name, module in model.named_modules() if isinstance(module, TTLinear))


def gates_of(model):
    return {name: parameter for name, parameter in model.named_parameters() if "rank_gate_" in name}


def written_settings(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


WITH = {"gates": {"removed": False}, "removed": {"gates": False}, "both": {}}
every_kind = pytest.mark.parametrize("kind", WITH.values(), ids=WITH.keys())


@every_architecture
@every_kind
def test_reload_gives_equal_logits_and_no_stray_keys(architecture, kind, tmp_path):
    model = new_model(architecture, **kind)
    inputs = architecture.inputs()
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    assert written_settings(tmp_path)["format_version"] == 3
    loaded, info = architecture.auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert info == NOTHING
    assert torch.equal(loaded(**inputs).logits, expected)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(p.requires_grad == (p.numel() > 0) for p in loaded.parameters())
    assert loaded.config.quantization_config == model.config.quantization_config
    assert loaded.get_submodule(first_linear(model)).is_removed == kind.get("removed", True)


@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "llama-tied", "t5", "vit"])
def test_gates_stay_float32_when_the_rest_is_loaded_in_16_bits(name, tmp_path):
    architecture = ARCHITECTURES[name]
    model = new_model(architecture)
    model.save_pretrained(tmp_path)
    loaded = architecture.auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    gates = gates_of(loaded)
    assert {parameter.dtype for parameter in gates.values()} == {torch.float32}
    assert all(torch.equal(gate, model.get_parameter(name)) for name, gate in gates.items())
    others = [parameter for name, parameter in loaded.named_parameters() if name not in gates]
    assert {parameter.dtype for parameter in others} == {torch.bfloat16}
    inputs = {key: v.bfloat16() if v.is_floating_point() else v for key, v in architecture.inputs().items()}
    # Llama's rotary frequencies are a buffer, which bfloat16() rounds and loading does not
    torch.testing.assert_close(loaded(**inputs).logits, model.bfloat16()(**inputs).logits, rtol=0.05, atol=0.02)


def test_a_model_in_16_bits_saves_exact_gates(tmp_path):
    model = new_model(ARCHITECTURES["bert-mlm"]).bfloat16()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], gate) for name, gate in gates_of(model).items())
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype="auto")
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in loaded.named_parameters())
    assert all(p.dtype == model.get_parameter(name).dtype for name, p in loaded.named_parameters())


def test_sharded_checkpoints(tmp_path):
    architecture = ARCHITECTURES["gpt2"]
    model = new_model(architecture)
    inputs = architecture.inputs()
    model.save_pretrained(tmp_path, max_shard_size="15KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(architecture.auto_class.from_pretrained(tmp_path)(**inputs).logits, model(**inputs).logits)


def test_the_format_version_is_the_lowest_that_will_do(tmp_path):
    model = new_model(ARCHITECTURES["bert-mlm"], removed=False)
    for module in model.modules():
        if isinstance(module, TTLinear):
            module.add_rank_gates()
    model.save_pretrained(tmp_path)
    assert written_settings(tmp_path)["format_version"] == 3
    fold_rank_gates(model)
    model.save_pretrained(tmp_path)
    assert written_settings(tmp_path)["format_version"] == 1
    assert not any("rank_gates" in entry for entry in written_settings(tmp_path)["layers"].values())


def test_ranks_and_gates_of_the_file_win_over_the_config(tmp_path):
    model = new_model(ARCHITECTURES["bert-mlm"], removed=False)
    cut_ranks({QUERY: model.get_submodule(QUERY)}, {QUERY: [torch.arange(rank) for rank in (3, 2, 1, 2, 4)]})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for entry in config["quantization_config"]["layers"].values():
        entry["ranks"] = [1] * len(entry["ranks"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.get_submodule(QUERY).ranks == (3, 2, 1, 2, 4)
    assert all(torch.equal(gate, model.get_parameter(name)) for name, gate in gates_of(loaded).items())


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGE = {
    "gate-too-long": (lambda t: t.update({f"{QUERY}.rank_gate_1": torch.ones(7)}), r"query' have shapes.*7.*damaged"),
    "gate-too-short": (lambda t: t.update({f"{QUERY}.rank_gate_1": torch.ones(1)}), "do not fit together"),
    "gate-missing": (lambda t: t.pop(f"{QUERY}.rank_gate_2"), "query' lacks rank_gate_2"),
    "half-removed": (lambda t: t.update({f"{QUERY}.core_2": torch.zeros(0, 4, 0)}), "do not fit together"),
}


@pytest.mark.parametrize(("edit", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_gates_are_named(edit, message, tmp_path):
    new_model(ARCHITECTURES["bert-mlm"], removed=False).save_pretrained(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ValueError, match=message):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@every_architecture
@every_kind
def test_merged_models_compute_the_same(architecture, kind):
    model = new_model(architecture, **kind)
    inputs = architecture.inputs()
    expected = model(**inputs).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    assert not is_comera_model(merged)
    assert not any(".core_" in name or "rank_gate_" in name for name, _ in merged.named_parameters())
    assert all(parameter.numel() for parameter in merged.parameters())


def test_copies_are_equal_and_apart():
    architecture = ARCHITECTURES["bert-mlm"]
    model = new_model(architecture)
    inputs = architecture.inputs()
    expected = model(**inputs).logits
    twin = copy.deepcopy(model)
    for gate in gates_of(model).values():
        gate.data.zero_()
    assert torch.equal(twin(**inputs).logits, expected)
    assert twin.comera_plan().layers == model.comera_plan().layers


def test_the_plan_shows_gates_and_removed_layers():
    model = new_model(ARCHITECTURES["bert-mlm"])
    plans = {layer.name: layer for layer in model.comera_plan()}
    assert plans[QUERY].ranks == (0,) * 5
    assert plans[QUERY].parameters == 0
    for name, layer in plans.items():
        assert layer.rank_gates
        assert layer.parameters == model.get_submodule(name).num_core_parameters
    assert QUERY in str(model.comera_plan())
    fold_rank_gates(model)
    assert not any(layer.rank_gates for layer in model.comera_plan())


def test_training_goes_on_after_loading(tmp_path):
    architecture = ARCHITECTURES["bert-mlm"]
    new_model(architecture, removed=False).save_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path)
    model(**architecture.training_inputs()).loss.backward()
    gates = [gate for gate in gates_of(model).values() if gate.numel()]
    assert gates
    assert all(gate.grad.abs().sum() > 0 for gate in gates)
