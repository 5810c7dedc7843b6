"""hf_comera/hub/quantizer.py: checkpoints load bit for bit, dense ones are decomposed, bad files are named."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, BertConfig

from hf_comera import ComeraConfig, get_comera_model, is_comera_model
from hf_comera.hub.checkpoint import NOTICE
from hf_comera.hub.quantizer import ComeraQuantizer
from hf_comera.modules import TensorTrainModule, TTLinear
from tests.architectures import ARCHITECTURES, every_architecture

NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}


@every_architecture
@pytest.mark.parametrize("shard", [None, "15KB"], ids=["one-file", "sharded"])
def test_reload_gives_equal_logits_and_no_stray_keys(architecture, shard, tmp_path):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    inputs = architecture.inputs()
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(shard)
    loaded, info = architecture.auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert info == NOTHING
    assert torch.equal(loaded(**inputs).logits, expected)
    assert type(loaded) is type(model)
    assert not hasattr(loaded, "hf_quantizer")
    assert not loaded.is_quantized
    assert not loaded.training


def test_reload_is_equal_to_the_bit_at_real_widths(tmp_path):
    """Views of the mapped file have other alignments, at which matrix products of this size round differently."""
    config = BertConfig(
        num_hidden_layers=2, hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=3
    )
    model = get_comera_model(AutoModelForSequenceClassification, ComeraConfig(rank=30), config=config).eval()
    ids = torch.randint(0, 30522, (2, 11))
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForSequenceClassification.from_pretrained(tmp_path)(ids).logits, expected)


@every_architecture
def test_bfloat16(architecture, tmp_path):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    model.save_pretrained(tmp_path)
    loaded = architecture.auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    rounded = dict(model.to(torch.bfloat16).named_parameters())
    assert all(torch.equal(parameter, rounded[name]) for name, parameter in loaded.named_parameters())
    inputs = {key: v.bfloat16() if v.is_floating_point() else v for key, v in architecture.inputs().items()}
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, rtol=0.05, atol=0.02)


@every_architecture
def test_ranks_come_from_the_file_layer_by_layer(architecture, tmp_path):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, TTLinear))
    smaller = TTLinear(
        layer.in_features,
        layer.out_features,
        in_factors=layer.in_factors,
        out_factors=layer.out_factors,
        ranks=(3, 2, 1, 2, 4),
    )
    layer.load_cores(smaller.cores())
    model.save_pretrained(tmp_path)
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text())
    assert config["quantization_config"]["layers"][name]["ranks"] == [3, 2, 1, 2, 4]
    for recorded in config["quantization_config"]["layers"].values():
        recorded["ranks"] = [1] * len(recorded["ranks"])  # stale on purpose: the file must win
    config_file.write_text(json.dumps(config))
    loaded = architecture.auto_class.from_pretrained(tmp_path)
    assert loaded.get_submodule(name).ranks == (3, 2, 1, 2, 4)
    inputs = architecture.inputs()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert loaded.config.quantization_config.layers[name]["ranks"] == [3, 2, 1, 2, 4]


@every_architecture
def test_decomposing_while_loading_equals_decomposing_in_place(architecture, tmp_path):
    dense = architecture.new_model()
    dense.save_pretrained(tmp_path)
    loaded = architecture.auto_class.from_pretrained(tmp_path, quantization_config=ComeraConfig(rank=4))
    in_place = get_comera_model(dense, ComeraConfig(rank=4))
    inputs = architecture.inputs()
    assert torch.equal(loaded(**inputs).logits, in_place(**inputs).logits)
    assert loaded.config.quantization_config.layers == in_place.config.quantization_config.layers
    assert all(layer.error is not None for layer in loaded.comera_plan())
    assert len([m for m in loaded.modules() if isinstance(m, TensorTrainModule)]) == architecture.num_layers


@every_architecture
def test_base_model_and_head_model_read_each_other(architecture, tmp_path):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    base.save_pretrained(tmp_path / "base")
    again = architecture.auto_class.from_pretrained(tmp_path / "base")
    cores = {name: p for name, p in again.named_parameters() if ".core_" in name}
    assert len(cores) >= 6 * 8
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in cores.items())
    assert all(p.isfinite().all() for p in again.parameters())


def test_fine_tuning_start_another_head_on_the_same_cores(tmp_path):
    model = get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=4), config=ARCHITECTURES["roberta"].new_config())
    model.save_pretrained(tmp_path)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert all(key.startswith("classifier") for key in info["missing_keys"])
    cores = [name for name, _ in model.named_parameters() if ".core_" in name]
    assert all(torch.equal(classifier.get_parameter(name), model.get_parameter(name)) for name in cores)


LOAD_WITHOUT_US = """
import sys, transformers
assert "hf_comera" not in sys.modules
{auto_class}.from_pretrained(sys.argv[1]{options})
"""


@pytest.mark.parametrize(
    ("auto_class", "options", "loads"),
    [
        ("transformers.AutoModelForMaskedLM", "", False),
        ("transformers.AutoModel", "", False),
        ("transformers.AutoModelForMaskedLM", ", ignore_mismatched_sizes=True", True),
        ("transformers.AutoModel", ", ignore_mismatched_sizes=True", True),
    ],
)
def test_a_process_without_hf_comera_is_told_to_import_it(auto_class, options, loads, tmp_path):
    """Without an option it raises; with it Transformers fills the layers at random, which nothing of ours can stop."""
    architecture = ARCHITECTURES["bert-mlm"]
    get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).save_pretrained(
        tmp_path
    )
    program = [sys.executable, "-c", LOAD_WITHOUT_US.format(auto_class=auto_class, options=options), str(tmp_path)]
    result = subprocess.run(
        program, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, cwd=tmp_path
    )
    assert (result.returncode == 0) == loads, result.stderr
    assert NOTICE in result.stdout + result.stderr
    assert "import hf_comera" in NOTICE
    assert loads or "size mismatch" in result.stderr or "ignore_mismatched_sizes" in result.stderr


@every_architecture
def test_the_guards_are_empty_tensors_under_the_dense_names(architecture, tmp_path):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        empty = [key for key in file.keys() if file.get_tensor(key).numel() == 0]
    assert len(empty) == len(model.comera_plan().layers) + 1
    assert all(name.endswith(".weight") for name in empty if name != NOTICE)
    assert not any(value.numel() == 0 for value in model.state_dict().values())


@pytest.fixture
def checkpoint(tmp_path):
    architecture = ARCHITECTURES["bert-mlm"]
    get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).save_pretrained(
        tmp_path
    )
    return tmp_path


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_tensors(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def newer_format(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format_version"] = 99
    (folder / "config.json").write_text(json.dumps(config))


def only_dense(tensors):
    for key in [key for key in tensors if ".core_" in key]:
        del tensors[key]


QUERY = "bert.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(truncate, r"model\.safetensors cannot be read as safetensors", id="truncated"),
        pytest.param(
            lambda folder: (folder / "model.safetensors").write_bytes(b"hello"), "cannot be read", id="foreign-bytes"
        ),
        pytest.param(change_tensors(only_dense), "holds no tensor-train cores", id="foreign-tensors"),
        pytest.param(
            change_tensors(lambda tensors: tensors.pop(f"{QUERY}.core_2")),
            r"model.safetensors: 'bert.encoder.layer.0.attention.self.query' lacks core_2",
            id="core-missing",
        ),
        pytest.param(
            change_tensors(lambda tensors: tensors.update({f"{QUERY}.core_2": torch.zeros(2, 3, 2)})),
            "do not fit together",
            id="bonds-disagree",
        ),
        pytest.param(newer_format, "format_version=99", id="newer-format"),
    ],
)
def test_damaged_checkpoints_raise(checkpoint, damage, message):
    damage(checkpoint)
    with pytest.raises(ValueError, match=message):
        AutoModelForMaskedLM.from_pretrained(checkpoint)


def test_a_config_given_for_a_compressed_checkpoint_has_no_effect_and_says_so(checkpoint):
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = AutoModelForMaskedLM.from_pretrained(checkpoint, quantization_config=ComeraConfig(rank=9))
    assert model.config.quantization_config.rank == 4


def test_wrong_shapes_of_dense_parameters_raise(checkpoint):
    change_tensors(lambda t: t.update({"bert.embeddings.LayerNorm.weight": torch.ones(49)}))(checkpoint)
    # recent Transformers names it, we do where it does not
    with pytest.raises((ValueError, RuntimeError), match=r"49|mismatch"):
        AutoModelForMaskedLM.from_pretrained(checkpoint)


def test_unknown_settings_of_a_newer_release_are_named_and_the_model_loads(checkpoint, caplog):
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["new_feature"] = True
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert is_comera_model(AutoModelForMaskedLM.from_pretrained(checkpoint))
    assert "['new_feature'] of the checkpoint are unknown" in caplog.text


def test_device_map_and_disk_offload(checkpoint, tmp_path_factory):
    architecture = ARCHITECTURES["bert-mlm"]
    inputs = architecture.inputs()
    expected = AutoModelForMaskedLM.from_pretrained(checkpoint)(**inputs).logits
    mapped = AutoModelForMaskedLM.from_pretrained(checkpoint, device_map={"": "cpu"})
    assert torch.equal(mapped(**inputs).logits, expected)
    device_map = {"bert.embeddings": "disk", "bert.encoder": "disk", "cls": "cpu"}
    offloaded = AutoModelForMaskedLM.from_pretrained(
        checkpoint, device_map=device_map, offload_folder=tmp_path_factory.mktemp("offload")
    )
    # halves are built layer by layer, which shows in last bits on some processors
    torch.testing.assert_close(offloaded(**inputs).logits, expected)


def test_a_weight_that_comes_in_parts_is_refused():
    parts = {"w1": [torch.ones(2, 2)], "w2": [torch.ones(2, 2)]}
    with pytest.raises(ValueError, match=r"fc.weight is made of 2 tensors of the checkpoint"):
        ComeraQuantizer(ComeraConfig()).get_quantize_ops().convert(
            parts, full_layer_name="fc.weight", model=None, missing_keys=set()
        )
