"""scripts/codebert/report.py: a whole name that also stands elsewhere in the code is hidden, whatever it is."""

import pytest
import torch
from datasets import Dataset
from transformers import RobertaConfig, RobertaForMaskedLM

from codebert.report import fill_masks
from codebert.tokens import SMALLEST_VOCABULARY, train_tokenizer

CODE = "def area(width, height):\n    total = width * height\n    return total"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        Dataset.from_dict({"docstring": ["Area."] * 50, "code": [CODE] * 50}), SMALLEST_VOCABULARY + 60
    )


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=130,
    )  # fmt: skip
    return RobertaForMaskedLM(config).eval()


def fill(model, tokenizer, codes, **options):
    functions = Dataset.from_dict({"docstring": ["Area."] * len(codes), "code": codes})
    return fill_masks(model, tokenizer, functions, max_seq_length=128, **options)


def test_last_whole_name_is_hidden_and_guessed(model, tokenizer):
    (filled,) = fill(model, tokenizer, [CODE], wanted=1)
    assert filled.name == "height"
    assert filled.code.replace("<mask>", filled.name) == CODE
    assert len(filled.guesses) == 5
    probabilities = [probability for _, probability in filled.guesses]
    assert probabilities == sorted(probabilities, reverse=True)
    assert 0 < sum(probabilities) <= 1


def test_one_of_each_part(model, tokenizer):
    filled = fill(model, tokenizer, [CODE.replace("area", name) for name in ("f", "g", "h", "i", "j", "k")])
    assert [one.code.split("(")[0] for one in filled] == ["def f", "def h", "def j"]


NOTHING_TO_HIDE = [
    pytest.param("def f(x):\n    return 1", id="no-name-twice"),
    pytest.param("return return return", id="keywords"),
    pytest.param("", id="empty"),
]


@pytest.mark.parametrize("code", NOTHING_TO_HIDE)
def test_functions_without_such_a_name_are_passed_over(model, tokenizer, code):
    assert fill(model, tokenizer, [code], wanted=1) == []


def test_plain_text_has_no_functions(model, tokenizer):
    assert fill_masks(model, tokenizer, Dataset.from_dict({"text": ["a b c"]}), max_seq_length=128) == []
