"""hf_comera/compress/storage.py in checkpoints: loaded weights are those that were packed, and pack to equal bytes."""

import copy
import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, BertForMaskedLM, TrainingArguments

from hf_comera import (
    ComeraConfig,
    ComeraTrainer,
    add_rank_gates,
    get_comera_model,
    inspect_checkpoint,
    is_comera_model,
    size_report,
)
from hf_comera.compress.storage import storage_bits
from hf_comera.hub.checkpoint import NOTICE
from hf_comera.modules import TTMEmbedding
from hf_comera.ops.quantization import dequantise_rows, quantise_rows
from hf_comera.training.ranks.pruning import cut_ranks
from tests.architectures import ARCHITECTURES, every_architecture

IDS = torch.arange(2, 14).view(2, 6)
NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}


def new_model(architecture, **settings):
    config = ComeraConfig(**{"rank": 6, **settings})
    return get_comera_model(architecture.auto_class, config, config=architecture.new_config()).eval()


def tensors(folder):
    """The bytes of all tensors and their dtypes; the id of the save is no tensor."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                tensor = file.get_tensor(key).contiguous()
                content = tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
                found[key] = (tensor.dtype, tuple(tensor.shape), hashlib.sha256(content).hexdigest())
    return found


@every_architecture
@pytest.mark.parametrize(
    ("storage", "dtype"),
    [("table in int4", torch.float32), ("int8", torch.bfloat16), ("int4", torch.float16)],
    ids=["mixed-float32", "int8-bfloat16", "int4-float16"],
)
def test_a_second_save_has_the_same_bytes_and_a_second_load_the_same_model(architecture, storage, dtype, tmp_path):
    model = new_model(architecture)
    if storage == "table in int4":
        tables = [n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, TTMEmbedding)]
        storage = {**dict.fromkeys(tables, "int4"), "*": "int8"}
    model.save_pretrained(tmp_path / "float")
    model = architecture.auto_class.from_pretrained(tmp_path / "float", dtype=dtype)  # T5 keeps some in float32
    model.save_pretrained(tmp_path / "one", storage=storage)
    loaded, info = architecture.auto_class.from_pretrained(tmp_path / "one", dtype=dtype, output_loading_info=True)
    assert info == NOTHING
    assert {name: p.dtype for name, p in loaded.named_parameters()} == {
        name: p.dtype for name, p in model.named_parameters()
    }
    loaded.save_pretrained(tmp_path / "two", max_shard_size="5KB")
    assert tensors(tmp_path / "one") == tensors(tmp_path / "two")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 1
    again = architecture.auto_class.from_pretrained(tmp_path / "two", dtype=dtype)
    expected = dict(loaded.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in again.named_parameters())
    inputs = {key: v.to(dtype) if v.is_floating_point() else v for key, v in architecture.inputs().items()}
    assert torch.equal(loaded(**inputs).logits, again(**inputs).logits)


SETTINGS = {
    "cores": {},
    "narrow table": {"embedding_width": 8},
    "narrow table as cores": {"embedding_width": 8, "embedding_num_factors": 2},
    "dense table": {"exclude_modules": ["word_embeddings"]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_what_is_packed_and_what_it_becomes(settings, tmp_path):
    model = new_model(
        ARCHITECTURES["bert-mlm"], storage={"word_embeddings": "int4", "query": "float", "*": "int8"}, **settings
    )
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = dict(ARCHITECTURES["bert-mlm"].auto_class.from_pretrained(tmp_path).named_parameters())
    kinds = set()
    for name, parameter in model.named_parameters():
        if stored[name].dtype == torch.float32:
            assert torch.equal(loaded[name], parameter)
            assert ".query." in name or parameter.dim() < 2 or parameter.numel() < 128
            continue
        bits = 4 if ".word_embeddings." in name else 8
        assert (stored[name].dtype, parameter.dim() > 1) == ({4: torch.uint8, 8: torch.int8}[bits], True)
        assert torch.equal(stored[name], quantise_rows(parameter, bits))
        assert torch.equal(loaded[name], dequantise_rows(stored[name], torch.float32).view(parameter.shape))
        kinds.add(name.rpartition(".")[2])
    assert "weight" in kinds  # of the positions, and of the head's transform
    assert kinds & {"core_1", "table", "projection"} or "dense table" in settings


def test_sizes_are_told_as_stored(tmp_path, capsys):
    model = new_model(ARCHITECTURES["bert-mlm"], storage="int8")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    report = size_report(model)
    parameters = {name for name, _ in model.named_parameters()}
    assert report.stored_bytes == sum(t.numel() * t.element_size() for key, t in stored.items() if key in parameters)
    assert report.stored_bytes < 0.4 * report.bytes
    model.print_trainable_parameters()
    assert f"stored in {report.stored_bytes / 1e6:.2f} MB" in capsys.readouterr().out
    model.config.quantization_config.storage = None
    assert size_report(model).stored_bytes == report.bytes


def test_the_setting_of_one_save_is_that_of_its_checkpoint_alone(tmp_path):
    model = new_model(ARCHITECTURES["gpt2"])
    model.save_pretrained(tmp_path / "int4", storage="int4")
    model.save_pretrained(tmp_path / "float")
    assert model.config.quantization_config.storage is None
    written = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("int4", "float")
    ]
    assert [(one.get("storage"), one["format_version"]) for one in written] == [("int4", 5), (None, 1)]
    assert {t.dtype for t in load_file(tmp_path / "float" / "model.safetensors").values()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "int4")
    loaded.save_pretrained(tmp_path / "again", storage="float")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), again.parameters(), strict=True))
    assert again.config.quantization_config.storage is None


@pytest.mark.parametrize("auto_class", [AutoModelForMaskedLM, AutoModelForCausalLM], ids=["bert", "llama"])
def test_a_tied_dense_table_is_stored_once(auto_class, tmp_path):
    architecture = ARCHITECTURES["bert-mlm" if auto_class is AutoModelForMaskedLM else "llama-tied"]
    model = new_model(
        architecture,
        storage="int8",
        exclude_modules=["word_embeddings" if auto_class is AutoModelForMaskedLM else "embed_tokens"],
    )
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tables = [name for name, tensor in stored.items() if tensor.dim() == 2 and len(tensor) == 241]
    assert len(tables) == 1
    loaded = auto_class.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    loaded.save_pretrained(tmp_path / "again")
    assert tensors(tmp_path) == tensors(tmp_path / "again")


def test_a_head_and_a_base_model_read_each_other(tmp_path):
    architecture = ARCHITECTURES["bert-mlm"]
    model = new_model(architecture, storage={"LayerNorm": "float", "transform.dense": "int4", "*": "int8"})
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    expected = dict(architecture.auto_class.from_pretrained(tmp_path / "head").named_parameters())
    assert all(torch.equal(p, expected[f"bert.{name}"]) for name, p in base.named_parameters() if "pooler" not in name)
    base.save_pretrained(tmp_path / "base")  # no layer of it is matched by the pattern for the head's transform
    again = dict(architecture.auto_class.from_pretrained(tmp_path / "base").named_parameters())
    names = [name for name in expected if name.startswith("bert.")]
    assert all(torch.equal(again[name], expected[name]) for name in names)


def test_states_that_are_handed_over_are_unpacked(tmp_path):
    model = new_model(ARCHITECTURES["bert-mlm"], storage="int8")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    given = BertForMaskedLM.from_pretrained(None, config=copy.deepcopy(loaded.config), state_dict=dict(state))
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys
    for other in (given, model):
        assert all(torch.equal(p, q) for p, q in zip(other.parameters(), loaded.parameters(), strict=True))
    small = new_model(ARCHITECTURES["bert-mlm"], rank=2)  # takes on the ranks of the state
    small.load_state_dict(state, strict=False)
    assert torch.equal(small(IDS).logits, loaded(IDS).logits)


def test_offloaded_and_mapped_models_are_unpacked(tmp_path):
    new_model(ARCHITECTURES["bert-mlm"], storage=dict(word_embeddings="int4", **{"*": "int8"})).save_pretrained(
        tmp_path
    )
    expected = AutoModelForMaskedLM.from_pretrained(tmp_path)(IDS).logits
    mapped = AutoModelForMaskedLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(mapped(IDS).logits, expected)
    places = {"bert.embeddings": "disk", "bert.encoder": "disk", "cls": "cpu"}
    offloaded = AutoModelForMaskedLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    torch.testing.assert_close(offloaded(IDS).logits, expected)
    with pytest.raises(ValueError, match="is offloaded or sharded, and only whole weights"):
        offloaded.save_pretrained(tmp_path / "again")


def test_gates_and_removed_layers_stay_as_they_are(tmp_path):
    model = new_model(ARCHITECTURES["bert-mlm"], storage="int4")
    add_rank_gates(model)
    query = "bert.encoder.layer.0.attention.self.query"
    cut_ranks({query: model.get_submodule(query)}, {query: [torch.arange(0)] * 5})
    model.save_pretrained(tmp_path / "one")
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert {t.dtype for name, t in stored.items() if ".rank_gate_" in name or query in name} == {torch.float32}
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "one")
    assert loaded.get_submodule(query).is_removed
    loaded.save_pretrained(tmp_path / "two")
    assert tensors(tmp_path / "one") == tensors(tmp_path / "two")


def test_training_goes_on_from_it_and_its_own_checkpoints_are_exact(tmp_path):
    architecture = ARCHITECTURES["bert-mlm"]
    new_model(architecture, storage="int8").save_pretrained(tmp_path / "stored")
    data = [{key: value[0] for key, value in architecture.training_inputs().items()} for _ in range(8)]

    def train(folder, resume=None):
        model = AutoModelForMaskedLM.from_pretrained(tmp_path / "stored")
        settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": "none"}
        args = TrainingArguments(str(folder), seed=1, use_cpu=True, disable_tqdm=True, **settings)
        trainer = ComeraTrainer(model=model, args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(folder / "end")
        return model

    whole = train(tmp_path / "whole")
    halfway = load_file(tmp_path / "whole" / "checkpoint-2" / "model.safetensors")
    assert {tensor.dtype for tensor in halfway.values()} == {torch.float32}
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert torch.int8 in {t.dtype for t in load_file(tmp_path / "whole" / "end" / "model.safetensors").values()}
    whole.save_pretrained(tmp_path / "checkpoint-9", storage="int4")
    assert torch.uint8 in {t.dtype for t in load_file(tmp_path / "checkpoint-9" / "model.safetensors").values()}


def test_merging_it_gives_a_plain_dense_checkpoint(tmp_path):
    new_model(ARCHITECTURES["llama-tied"], storage="int8").save_pretrained(tmp_path / "stored")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stored")
    expected = model(IDS).logits
    model.merge_and_unload().save_pretrained(tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert not is_comera_model(dense)
    torch.testing.assert_close(dense(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@every_architecture
def test_a_dense_model_is_stored_smaller(architecture, tmp_path):
    dense = architecture.new_model()
    expected = {name: parameter.detach().clone() for name, parameter in dense.named_parameters()}
    model = get_comera_model(dense, ComeraConfig(target_modules=[], storage="int8"))
    assert model.comera_plan().layers == []
    model.save_pretrained(tmp_path / "one")
    loaded, info = architecture.auto_class.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert info == NOTHING
    num_packed = 0
    for name, parameter in loaded.named_parameters():
        packs = parameter.dim() > 1 and parameter.numel() >= 128
        wanted = expected[name]
        if packs:
            wanted = dequantise_rows(quantise_rows(wanted, 8), torch.float32).view(wanted.shape)
        num_packed += packs
        assert torch.equal(parameter, wanted)
    assert num_packed > 8
    loaded.save_pretrained(tmp_path / "two")
    assert tensors(tmp_path / "one") == tensors(tmp_path / "two")
    assert inspect_checkpoint(tmp_path / "one").plan.layers == []
    with pytest.raises(ValueError, match=r"has no compressed layer.*merge_and_unload\(\).save_pretrained"):
        loaded.save_pretrained(tmp_path / "three", storage="float")
    assert not is_comera_model(loaded.merge_and_unload())


def test_a_dense_checkpoint_is_stored_smaller_while_it_is_loaded(tmp_path, caplog):
    dense = ARCHITECTURES["gpt2"].new_model()
    dense.save_pretrained(tmp_path / "dense")
    settings = ComeraConfig(target_modules=[], storage={"wte": "int4", "*": "int8"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=settings)
    model.save_pretrained(tmp_path / "stored")
    assert not caplog.text
    assert size_report(model).stored_bytes < 0.3 * size_report(model).bytes
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stored")
    torch.testing.assert_close(loaded(IDS).logits, dense(IDS).logits, rtol=0.2, atol=0.2)
    program = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": ""}
    without = [sys.executable, "-c", program, str(tmp_path / "stored")]
    result = subprocess.run(without, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode != 0
    assert NOTICE in result.stdout + result.stderr


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_refused_by_name_and_the_folder_stays(bad, tmp_path):
    model = new_model(ARCHITECTURES["bert-mlm"], storage="int8")
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        model.get_parameter("bert.encoder.layer.1.output.dense.core_2")[0, 0, 1] = bad
    with pytest.raises(ValueError, match=r"layer.1.output.dense.core_2 cannot be stored in int8: .*NaN or infinite"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    model.save_pretrained(tmp_path, storage="float")


def test_8_bit_integers_of_the_model_itself_are_refused(tmp_path):
    model = new_model(ARCHITECTURES["bert-mlm"], storage="int8")
    model.bert.register_buffer("marks", torch.zeros(3, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"bert.marks has dtype torch.uint8 in the model itself"):
        model.save_pretrained(tmp_path)


BAD = {
    "another name": ("int2", "storage='int2' is needed as 'float', 'int8', 'int4', or a dictionary"),
    "a number": (8, "storage=8 is needed"),
    "a list": (["int8"], "is needed as"),
    "another name in a pattern": ({"query": "int3"}, "is needed as"),
    "a pattern that is none": ({"(query": "int8"}, "is needed as"),
    "a layer that is not there": (
        {"no_layer": "int8"},
        r"storage: 'no_layer' matches no layer .* It has word_embeddings",
    ),
}


@pytest.mark.parametrize(("storage", "message"), BAD.values(), ids=BAD.keys())
def test_bad_settings_are_refused(storage, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        new_model(ARCHITECTURES["bert-mlm"], storage=storage)
    model = new_model(ARCHITECTURES["bert-mlm"])
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path / "new", storage=storage)
    assert not (tmp_path / "new").exists()
    assert model.config.quantization_config.storage is None


def test_the_longest_pattern_decides_in_whatever_order(tmp_path):
    patterns = {"*": "int8", "dense": "int4", "output.dense": "float", ".*": "float", "word_embeddings": "int8"}
    model = new_model(ARCHITECTURES["bert-mlm"], storage=patterns, rank=12)
    bits = storage_bits(model, patterns)
    assert bits == storage_bits(model, dict(reversed(patterns.items())))
    chosen = {
        name: bits.get(f"bert.{name}.core_1")
        for name in (
            "encoder.layer.0.intermediate.dense",
            "encoder.layer.0.output.dense",
            "embeddings.word_embeddings",
            "encoder.layer.0.attention.self.query",
        )
    }
    assert list(chosen.values()) == [4, None, 8, None]
