"""scripts/compress/texts.py: each text is used once, on one side, and files that hold no texts are refused."""

import json

import pytest

from compress.settings import Settings
from compress.texts import load_texts
from tests.scripts.test_compress_pretrained import sentences


def settings(*paths, **options):
    return Settings(model="m", texts=[str(path) for path in paths], held_out_percentage=20, **options)


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


def rows(column, texts):
    return "".join(json.dumps({column: text}) + "\n" for text in texts)


def test_each_text_is_on_one_side_once(tmp_path):
    plain = write(tmp_path / "a.txt", "\n".join([*sentences(60), "", "  ", *(f" {text} " for text in sentences(20))]))
    table = write(tmp_path / "b.jsonl", rows("body", [*sentences(80), None]))
    found = load_texts(settings(plain, table, column="body"))
    assert found.num_read == 162
    assert sorted(found.train + found.held_out) == sorted(sentences(80))
    assert found.held_out
    assert len(load_texts(settings(plain, max_held_out=2)).held_out) == 2


def test_the_side_depends_on_the_text_alone(tmp_path):
    few = load_texts(settings(write(tmp_path / "a.txt", "\n".join(sentences(50)))))
    many = load_texts(settings(write(tmp_path / "b.txt", "\n".join(reversed(sentences(90))))))
    assert set(few.held_out) <= set(many.held_out)
    assert few.fingerprint != many.fingerprint


REFUSED = [
    ("a.txt", "", "no text in 0 rows"),
    ("a.txt", "\n \n", "no text in 2 rows"),
    ("a.txt", "one", "takes . of the 1 different texts, and both sides need some"),
    ("a.doc", "text", "ends in .doc. Known endings: .txt, .csv"),
    ("a.csv", "", "is empty. It needs a column of texts, text"),
    ("a.csv", "body\nhello\n", "--column text is no column of .*, which has body. .* --column body"),
    ("a.jsonl", '{"text": 5}\n', "--column text of .* has 5 in row 0, which is no text"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_files_that_hold_no_texts_are_refused(name, content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_texts(settings(write(tmp_path / name, content)))


def test_another_encoding_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="is no text in UTF-8"):
        load_texts(settings(tmp_path / "a.txt"))
