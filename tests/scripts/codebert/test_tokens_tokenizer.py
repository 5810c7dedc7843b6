"""scripts/codebert/tokens.py: the trained tokenizer has RoBERTa's specials, loses nothing, and loads as any other."""

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from codebert.tokens import SMALLEST_VOCABULARY, load_tokenizer, train_tokenizer

TEXTS = ["def area(width, height):\n    return width * height\n", "    self.näme = 'ü'  # ☃\n", "", "a  b\t\tc\r\n"]


@pytest.fixture(scope="module")
def tokenizer():
    corpus = Dataset.from_dict({"docstring": ["Area of a rectangle."] * 20, "code": [TEXTS[0]] * 20})
    return train_tokenizer(corpus, SMALLEST_VOCABULARY + 40)


def test_specials_have_the_first_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 4]
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]
    assert SMALLEST_VOCABULARY < len(tokenizer) <= SMALLEST_VOCABULARY + 40


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_pair_is_the_bimodal_input(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("a", "b")["input_ids"])
    assert tokens == ["<s>", "a", "</s>", "b", "</s>"]


def test_loads_with_auto_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert loaded(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
        assert loaded.special_tokens_map == tokenizer.special_tokens_map
        assert loaded("x = <mask>")["input_ids"][-2] == 4


def test_training_twice_gives_the_same(tokenizer):
    corpus = Dataset.from_dict({"docstring": ["Area of a rectangle."] * 20, "code": [TEXTS[0]] * 20})
    again = train_tokenizer(corpus, SMALLEST_VOCABULARY + 40)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_too_small_a_vocabulary_names_the_smallest():
    with pytest.raises(ValueError, match=rf"--vocab_size 100 .*need {SMALLEST_VOCABULARY}"):
        train_tokenizer(Dataset.from_dict({"text": ["x"]}), 100)


def test_missing_tokenizer_says_what_to_give(tmp_path):
    with pytest.raises(ValueError, match="--tokenizer_name"):
        load_tokenizer(tmp_path)


def test_tokenizer_without_mask_is_refused(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"mask_token": "<mask>",', ""), encoding="utf-8")
    with pytest.raises(ValueError, match="has no mask_token"):
        load_tokenizer(tmp_path)
