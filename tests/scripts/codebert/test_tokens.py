"""scripts/codebert/tokens.py: functions become ``<s> docstring </s> code </s>``, text becomes blocks."""

import pytest
from datasets import Dataset, DatasetDict

from codebert.tokens import (
    SMALLEST_VOCABULARY,
    bimodal_ids,
    check_length,
    encode_corpus,
    sequence_lengths,
    text_ids,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(Dataset.from_dict({"text": ["none"]}), SMALLEST_VOCABULARY)  # bytes only: one a character


def text_of(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("Ġ", " ").replace("Ċ", "\n")


CASES = [  # (docstring, code, longest, expected)
    pytest.param("doc", "code", 20, "<s>doc</s>code</s>", id="fits"),
    pytest.param("", "code", 20, "<s></s>code</s>", id="no-docstring"),
    pytest.param("docdocdoc", "codecodecode", 13, "<s>docdo</s>codec</s>", id="both-cut"),
    pytest.param("docdocdoc", "code", 13, "<s>docdoc</s>code</s>", id="docstring-cut"),
    pytest.param("doc", "codecodecode", 13, "<s>doc</s>codecod</s>", id="code-cut"),
]


@pytest.mark.parametrize(("docstring", "code", "longest", "expected"), CASES)
def test_bimodal(tokenizer, docstring, code, longest, expected):
    (ids,) = bimodal_ids([docstring], [code], tokenizer, longest)
    assert text_of(tokenizer, ids) == expected
    assert len(ids) <= longest


def test_bimodal_is_what_the_tokenizer_makes_of_a_pair(tokenizer):
    (ids,) = bimodal_ids(["doc"], ["code"], tokenizer, 64)
    assert ids == tokenizer("doc", "code")["input_ids"]


def test_text_is_joined_and_cut(tokenizer):
    blocks = text_ids(["abc", "", "defg"], tokenizer, 7)
    assert [text_of(tokenizer, ids) for ids in blocks] == ["<s>abc\n\n</s>", "<s>defg\n</s>"]


def test_text_line_by_line(tokenizer):
    lines = text_ids(["abc", "  ", "defghijk"], tokenizer, 7, line_by_line=True)
    assert [text_of(tokenizer, ids) for ids in lines] == ["<s>abc</s>", "<s>defgh</s>"]


def test_whole_corpus(tokenizer):
    split = Dataset.from_dict({"docstring": ["a", "bb"], "code": ["c", "d" * 50]})
    encoded = encode_corpus(DatasetDict(train=split, validation=split), tokenizer, 16)
    assert encoded["train"].column_names == ["input_ids"]
    assert sequence_lengths(encoded["train"]).tolist() == [5, 16]


def test_blank_text_raises(tokenizer):
    blank = DatasetDict(train=Dataset.from_dict({"text": ["", " "]}))
    with pytest.raises(ValueError, match="2 rows but no token"):
        encode_corpus(blank, tokenizer, 16, line_by_line=True)


LENGTHS = [  # (wanted, longest, used)
    pytest.param(None, 512, 128, id="default"),
    pytest.param(None, 64, 64, id="default-of-a-short-model"),
    pytest.param(None, None, 128, id="no-limit"),
    pytest.param(512, 512, 512, id="as-long-as-the-model"),
]


@pytest.mark.parametrize(("wanted", "longest", "used"), LENGTHS)
def test_length(wanted, longest, used):
    assert check_length(wanted, longest) == used


@pytest.mark.parametrize(
    ("wanted", "longest", "message"), [(513, 512, "Use --max_seq_length 512"), (4, None, "at least 8")]
)
def test_length_that_cannot_be(wanted, longest, message):
    with pytest.raises(ValueError, match=message):
        check_length(wanted, longest)
