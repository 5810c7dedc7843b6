"""hf_comera/hub/build.py: ways to a compressed model, equal where they should be, no dense weight in memory."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM, BertForMaskedLM

from hf_comera import ComeraConfig, get_comera_model, is_comera_model
from hf_comera.modules import TensorTrainModule, TiedEmbedding, TiedHead
from tests.architectures import ARCHITECTURES, every_architecture


@every_architecture
def test_a_live_model_stays_the_same_object_and_class(architecture):
    model = architecture.new_model()
    same = get_comera_model(model, ComeraConfig(rank=4))
    assert same is model
    assert is_comera_model(model)
    assert isinstance(model, type(architecture.new_model()))
    assert type(model).__name__ == type(architecture.new_model()).__name__


@every_architecture
def test_from_scratch_trains_every_parameter(architecture):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    assert model.training
    assert all(p.isfinite().all() for p in (*model.parameters(), *model.buffers()))
    model(**architecture.training_inputs()).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing


@every_architecture
def test_from_scratch_has_the_buffers_and_plain_weights_of_the_dense_model(architecture):
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    dense = architecture.new_model()
    for name, buffer in dense.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    for name, parameter in dense.named_parameters():
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), TensorTrainModule | TiedHead | TiedEmbedding):
            std = parameter.std(correction=0).item()
            assert model.get_parameter(name).std(correction=0).item() == pytest.approx(std, rel=0.2, abs=0.001), name


def test_concrete_classes_dtype_and_seed():
    config = ARCHITECTURES["bert-mlm"].new_config()
    torch.manual_seed(3)
    first = get_comera_model(BertForMaskedLM, ComeraConfig(rank=4), config=config, dtype=torch.bfloat16)
    torch.manual_seed(3)
    second = get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=4), config=config, dtype=torch.bfloat16)
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_one_config_serves_two_models():
    config = ComeraConfig(rank=4)
    first = get_comera_model(ARCHITECTURES["gpt2"].new_model(), config)
    second = get_comera_model(ARCHITECTURES["bert-mlm"].new_model(), config)
    assert config.layers is None
    assert set(first.config.quantization_config.layers).isdisjoint(second.config.quantization_config.layers)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_comera_model(AutoModelForMaskedLM, ComeraConfig()), "A new AutoModelForMaskedLM needs config="),
        (lambda: get_comera_model(nn.Linear(4, 4), ComeraConfig()), "Linear is not a Transformers PreTrainedModel"),
        (lambda: get_comera_model(ARCHITECTURES["gpt2"].new_model(), {"rank": 3}), "is needed as a ComeraConfig"),
        (
            lambda: get_comera_model(AutoModelForMaskedLM, ARCHITECTURES["bert-mlm"].new_config()),
            "^comera_config is a BertConfig, but a ComeraConfig is needed before it: get_comera_model.*config=config",
        ),
        (
            lambda: get_comera_model(
                ARCHITECTURES["gpt2"].new_model(), ComeraConfig(), config=ARCHITECTURES["gpt2"].new_config()
            ),
            "config and dtype are for new models",
        ),
        (
            lambda: get_comera_model(
                get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=2)), ComeraConfig(rank=2)
            ),
            "already holds compressed layers",
        ),
        (
            lambda: get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(layers={"a": {}})),
            "Pass a fresh ComeraConfig",
        ),
        (
            lambda: get_comera_model(ARCHITECTURES["gpt2"].new_model().to("meta"), ComeraConfig(rank=2)),
            "is on the meta device: there is nothing to decompose",
        ),
    ],
)
def test_bad_calls_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


RESIDENT = """
    import resource, sys, torch, transformers
    transformers.utils.logging.disable_progress_bar()
    from transformers import AutoModelForCausalLM, LlamaConfig
    from hf_comera import ComeraConfig, get_comera_model
    config = LlamaConfig(vocab_size=32000, hidden_size=2048, num_hidden_layers=2, num_attention_heads=16,
                         intermediate_size=8192, tie_word_embeddings=True)
    warm = LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    small = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=2), config=warm)
    small.save_pretrained(sys.argv[1] + "/warm")
    AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/warm")
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before = peak()
    model = get_comera_model(AutoModelForCausalLM, ComeraConfig(rank=8), config=config)
    model.save_pretrained(sys.argv[1] + "/model")
    built = peak()
    del model
    AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model")
    print(built - before, peak() - built)
"""


def test_the_dense_model_is_never_in_memory(tmp_path):
    """Its 201 million parameters would take 800 MB, its embedding alone 262 MB."""
    program = [sys.executable, "-c", textwrap.dedent(RESIDENT), str(tmp_path)]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    building, loading = (float(number) for number in printed.split()[-2:])
    assert building < 60, f"building from scratch took {building:.0f} MB"
    assert loading < 60, f"loading took {loading:.0f} MB"


def test_a_name_is_not_a_model():
    with pytest.raises(ValueError, match=r"model='gpt2' is a name. For its trained weights: AutoModel"):
        get_comera_model("gpt2", ComeraConfig(rank=4))
