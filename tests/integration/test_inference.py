"""generate, pipeline and torch.compile work on compressed models as they are."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, pipeline

from hf_comera import ComeraConfig, get_comera_model
from tests.architectures import ARCHITECTURES, VOCABULARY, every_architecture


def compressed(architecture):
    return get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0", mask_token="w2")


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "llama-untied", "mistral", "qwen2", "t5"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_equals_generating_with_the_merged_model(name, cache):
    architecture = ARCHITECTURES[name]
    if (name, cache) == ("t5", "static"):
        cache = None
    model, ids = compressed(architecture), architecture.inputs()["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, **({"cache_implementation": cache} if cache else {})}
    ours = model.generate(input_ids=ids, **settings)
    assert torch.equal(ours, model.merge_and_unload().generate(input_ids=ids, **settings))


@every_architecture
def test_compiles_as_one_graph(architecture):
    torch._dynamo.reset()
    model, inputs = compressed(architecture), architecture.inputs()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


def test_compiled_training_step_has_the_same_gradients():
    torch._dynamo.reset()
    architecture = ARCHITECTURES["bert-mlm"]
    model, batch = compressed(architecture), architecture.training_inputs()
    model(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(**batch).loss.backward()
    for name, grad in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, msg=name)


def test_text_generation_pipeline(tokenizer, tmp_path):
    compressed(ARCHITECTURES["gpt2"]).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    answer = pipeline("text-generation", model=str(tmp_path), device="cpu")(
        "w3 w4 w5", max_new_tokens=3, do_sample=False
    )
    assert answer[0]["generated_text"].startswith("w3 w4 w5")


def test_fill_mask_pipeline(tokenizer, tmp_path):
    compressed(ARCHITECTURES["bert-mlm"]).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    answer = pipeline("fill-mask", model=str(tmp_path), device="cpu")("w3 w2 w5")
    assert len(answer) == 5


def test_text_classification_pipeline(tokenizer, tmp_path):
    assert ARCHITECTURES["bert-classifier"].auto_class is AutoModelForSequenceClassification
    compressed(ARCHITECTURES["bert-classifier"]).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    answer = pipeline("text-classification", model=str(tmp_path), device="cpu")("w3 w4 w5")
    assert answer[0]["label"] in ("LABEL_0", "LABEL_1")
