"""hf_comera/hub/model.py: methods of a compressed model; merged checkpoints are ordinary; copies and pickles work."""

import copy
import os
import pickle
import re
import subprocess
import sys

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    MarianConfig,
    MarianMTModel,
)

from hf_comera import ComeraConfig, get_comera_model, is_comera_model, merge_and_unload
from hf_comera.modules import TensorTrainModule
from tests.architectures import ARCHITECTURES, every_architecture


def compressed(architecture, **settings):
    return get_comera_model(
        architecture.auto_class, ComeraConfig(rank=4, **settings), config=architecture.new_config()
    ).eval()


@every_architecture
def test_merged_model_is_an_ordinary_one(architecture, tmp_path):
    model = compressed(architecture)
    inputs = architecture.inputs()
    expected = model(**inputs).logits
    merged = model.merge_and_unload()
    assert merged is model
    assert not is_comera_model(model)
    assert type(model) is type(architecture.new_model())
    assert not hasattr(model.config, "quantization_config")
    assert not model.model_tags
    error = (model(**inputs).logits - expected).norm() / expected.norm()
    assert error < 1e-5
    model.save_pretrained(tmp_path)
    loaded, info = architecture.auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert not any(isinstance(m, TensorTrainModule) for m in loaded.modules())


def loaded(architecture, folder):
    compressed(architecture).save_pretrained(folder)
    return architecture.auto_class.from_pretrained(folder)


WAYS = {
    "built": lambda architecture, folder: compressed(architecture),
    "live": lambda architecture, folder: get_comera_model(architecture.new_model(), ComeraConfig(rank=4)),
    "loaded": loaded,
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_dequantize_is_transformers_name_for_it(way, dtype, tmp_path):
    architecture = ARCHITECTURES["gpt2"]
    model = way(architecture, tmp_path)
    merged = copy.deepcopy(model).merge_and_unload().to(dtype or model.dtype)
    assert model.dequantize(dtype) is model
    assert not is_comera_model(model)
    assert not hasattr(model.config, "quantization_config")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in merged.state_dict().items())
    assert model.dtype == (dtype or torch.float32)


MERGED_ELSEWHERE = """
import sys, torch, transformers
model, inputs, expected = torch.load(sys.argv[1] + "/case.pt", weights_only=True)
loaded = getattr(transformers, model).from_pretrained(sys.argv[1]).eval()
assert not any(name.startswith("hf_comera") for name in sys.modules)
logits = loaded(**inputs).logits
print(((logits - expected).norm() / expected.norm()).item())
"""


@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "t5"])
def test_merged_checkpoint_loads_in_a_process_without_hf_comera(name, tmp_path):
    architecture = ARCHITECTURES[name]
    model = compressed(architecture)
    inputs = architecture.inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
    model.merge_and_unload().save_pretrained(tmp_path)
    torch.save((architecture.auto_class.__name__, inputs, expected), tmp_path / "case.pt")
    program = [sys.executable, "-c", MERGED_ELSEWHERE, str(tmp_path)]
    result = subprocess.run(
        program, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1e-5


@every_architecture
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_compressed_models_too(architecture, duplicate):
    model = compressed(architecture)
    inputs = architecture.inputs()
    twin = duplicate(model)
    assert type(twin) is type(model)
    assert torch.equal(twin(**inputs).logits, model(**inputs).logits)
    assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in model.parameters()})


def test_casting_is_allowed():
    model = compressed(ARCHITECTURES["llama-tied"])
    assert {p.dtype for p in model.half().parameters()} == {torch.float16}
    assert {p.dtype for p in model.float().parameters()} == {torch.float32}


def test_plan_and_sizes_of_a_compressed_model(capsys):
    model = get_comera_model(ARCHITECTURES["bert-mlm"].new_model(), ComeraConfig(rank=4))
    text = str(model.comera_plan())
    assert "error" in text
    assert "bert.encoder.layer.1.output.dense" in text
    assert model.comera_plan().parameters == sum(p.numel() for p in model.parameters())
    model.print_trainable_parameters()
    assert "ratio" in capsys.readouterr().out


def test_a_lossy_decomposition_is_told(caplog):
    get_comera_model(ARCHITECTURES["bert-mlm"].new_model(), ComeraConfig(rank=10_000))
    assert not caplog.text
    get_comera_model(ARCHITECTURES["bert-mlm"].new_model(), ComeraConfig(rank=2))
    assert "lost more than 30 % of the norm of 13 of 13 layers" in caplog.text


def test_resizing_a_compressed_embedding_raises_with_the_way_out():
    model = compressed(ARCHITECTURES["gpt2"])
    assert model.resize_token_embeddings(241) is model.get_input_embeddings()
    way_out = (
        r"resize_token_embeddings\(250\).*'transformer.wte'.*241 rows.*merge_and_unload.*exclude_modules=\['wte'\]"
    )
    with pytest.raises(ValueError, match=way_out):
        model.resize_token_embeddings(250)
    for options in ({"pad_to_multiple_of": 64}, {"new_num_tokens": 241, "pad_to_multiple_of": 64}):
        with pytest.raises(ValueError, match=r"resize_token_embeddings\(256\)"):
            model.resize_token_embeddings(**options)
    dense_embedding = compressed(ARCHITECTURES["llama-untied"], exclude_modules=["embed_tokens"])
    assert dense_embedding.resize_token_embeddings(250).num_embeddings == 250


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm", "llama-untied"])
def test_the_way_out_of_resizing_keeps_what_the_model_computes(name):
    model, inputs = compressed(ARCHITECTURES[name]), ARCHITECTURES[name].inputs()
    expected = model(**inputs).logits
    with pytest.raises(ValueError, match="resize_token_embeddings") as refusal:
        model.resize_token_embeddings(250)
    (excluded,) = re.search(r"exclude_modules=\['(\w+)'\]", str(refusal.value)).groups()
    model.merge_and_unload().resize_token_embeddings(250)
    model = get_comera_model(model, ComeraConfig(rank=4, exclude_modules=[excluded])).eval()
    logits = model(**inputs).logits
    assert logits.shape[-1] == 250
    assert (logits[..., :241] - expected).norm() / expected.norm() < 1e-4
    assert model.resize_token_embeddings(260).num_embeddings == 260


def test_merging_a_dense_model_raises():
    with pytest.raises(ValueError, match="BertForMaskedLM is not a compressed model"):
        merge_and_unload(ARCHITECTURES["bert-mlm"].new_model())


def test_a_state_dict_given_by_the_caller_is_what_is_saved(tmp_path):
    model = compressed(ARCHITECTURES["bert-mlm"])
    state = {name: value + 1.0 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    keys = list(state)
    model.save_pretrained(tmp_path, state_dict=state)
    assert list(state) == keys
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    name = "bert.encoder.layer.0.attention.self.query.core_0"
    torch.testing.assert_close(loaded.get_parameter(name), model.get_parameter(name) + 1.0)


@every_architecture
def test_the_config_that_was_given_stays_as_it_was(architecture):
    config = architecture.new_config()
    before = copy.deepcopy(config)
    models = [get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=config) for _ in range(2)]
    assert config.to_dict() == before.to_dict()
    assert not hasattr(config, "quantization_config")
    models[0].merge_and_unload()
    assert models[1].config.quantization_config.layers
    dense = architecture.auto_class.from_config(config)
    shared = dense.config
    get_comera_model(dense, ComeraConfig(rank=4))
    assert not hasattr(shared, "quantization_config")
    assert not any(value is shared for module in dense.modules() for value in vars(module).values())


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_an_adapter_of_a_dense_layer_leaves_the_head_tied(tmp_path):
    model = compressed(ARCHITECTURES["gpt2"], exclude_modules=["c_attn"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    merged = adapted.merge_and_unload()
    ids = torch.arange(9).unsqueeze(0)
    expected = merged(ids).logits
    merged.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(loaded.eval()(ids).logits, expected)


def test_adapters_of_all_linear_layers_that_stayed_dense(tmp_path):
    model = compressed(ARCHITECTURES["bert-mlm"], target_modules=["intermediate.dense"])
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForMaskedLM.from_pretrained(tmp_path / "base")
    inputs = ARCHITECTURES["bert-mlm"].inputs()
    untouched, expected = base(**inputs).logits, adapted.eval()(**inputs).logits
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(**inputs).logits, expected)
    assert not torch.allclose(untouched, expected)
    torch.testing.assert_close(loaded.merge_and_unload()(**inputs).logits, expected)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_prompts_are_tuned_where_peft_is_given_the_embedding():
    model = compressed(ARCHITECTURES["gpt2"])
    adapted = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    adapted.word_embeddings = model.get_input_embeddings()
    ids = torch.arange(9).unsqueeze(0)
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert trained == ["prompt_encoder.default.embedding.weight"]


def test_a_head_without_its_embedding_is_not_saved(tmp_path):
    model = compressed(ARCHITECTURES["gpt2"])
    model.set_input_embeddings(torch.nn.Embedding(241, 48))
    with pytest.raises(ValueError, match="'lm_head' computes with the cores of an embedding that is not in"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_ties_that_a_config_decides_come_back(tmp_path):
    """Marian's depend on share_encoder_decoder_embeddings."""
    config = MarianConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    ties = MarianMTModel(config).all_tied_weights_keys
    model = get_comera_model(MarianMTModel, ComeraConfig(rank=4), config=config)
    model.save_pretrained(tmp_path / "compressed")
    merged = MarianMTModel.from_pretrained(tmp_path / "compressed").merge_and_unload()
    assert merged.all_tied_weights_keys == ties
    merged.save_pretrained(tmp_path / "dense")
    _, info = MarianMTModel.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not info["missing_keys"]


def test_targeted_layers_that_a_dense_checkpoint_lacks_are_named(tmp_path, caplog):
    config = ARCHITECTURES["bert-mlm"].new_config()
    config.num_hidden_layers = 1
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    settings = {"quantization_config": ComeraConfig(rank=4), "num_hidden_layers": 2}
    with caplog.at_level("WARNING", logger="hf_comera"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, **settings)
    assert (
        "6 targeted layers are not in the checkpoint and stay dense, for example bert.encoder.layer.1" in caplog.text
    )
