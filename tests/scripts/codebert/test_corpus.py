"""scripts/codebert/corpus.py: every source gives the same two columns, held-out text never meets training text."""

import json

import pandas
import pytest

from codebert.corpus import bimodal_columns, load_corpus, standard_library_functions
from codebert.settings import DataSettings

FUNCTION = 'def f{n}(x):\n    """Add {n}."""\n    return x + {n}\n'


def data_settings(**changes):
    return DataSettings(**{"max_eval_samples": None, "validation_split_percentage": 25, **changes})


def write_modules(root, count=60):
    for number in range(count):
        (root / f"module_{number}.py").write_text(FUNCTION.format(n=number), encoding="utf-8")


def pairs(count=40):
    return [{"code": FUNCTION.format(n=n), "docstring": f"Add {n}."} for n in range(count)]


def write(path, rows):
    if path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_library_is_split_by_file_and_the_same_every_time(tmp_path):
    write_modules(tmp_path)
    rows = standard_library_functions(tmp_path, held_out_percentage=25)
    assert rows == standard_library_functions(tmp_path, held_out_percentage=25)
    splits = {row["path"]: row["split"] for row in rows}
    assert len(splits) == len(rows) == 60
    assert 5 < list(splits.values()).count("validation") < 30


def test_library_skips_tests_installed_packages_and_copies(tmp_path):
    for folder in ("test", "site-packages/other", "package/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(FUNCTION.format(n=folder.count("/")), encoding="utf-8")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(FUNCTION.format(n=7), encoding="utf-8")
    assert [row["path"] for row in standard_library_functions(tmp_path)] == ["a.py"]


def test_library_without_sources_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="--train_file"):
        standard_library_functions(tmp_path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_files_of_pairs(tmp_path, suffix):
    corpus = load_corpus(data_settings(train_file=write(tmp_path / f"train{suffix}", pairs())))
    assert corpus["train"].column_names == corpus["validation"].column_names == ["docstring", "code"]
    assert len(corpus["train"]) + len(corpus["validation"]) == 40
    assert corpus["train"][0]["docstring"] not in corpus["train"][0]["code"]
    assert not set(corpus["train"]["code"]) & set(corpus["validation"]["code"])


def test_code_search_net_columns(tmp_path):
    rows = [
        {"func_code_string": row["code"], "func_documentation_string": row["docstring"], "language": "python"}
        for row in pairs()
    ]
    corpus = load_corpus(data_settings(train_file=write(tmp_path / "train.jsonl", rows)))
    assert corpus["train"].column_names == ["docstring", "code"]
    assert '"""' not in "".join(corpus["train"]["code"])


def test_split_column_is_followed_and_the_test_part_left_alone(tmp_path):
    rows = [{**row, "split": name} for row, name in zip(pairs(4), ["train", "valid", "test", "train"], strict=True)]
    corpus = load_corpus(data_settings(train_file=write(tmp_path / "train.parquet", rows)))
    assert list(corpus["train"]["docstring"]) == ["Add 0.", "Add 3."]
    assert list(corpus["validation"]["docstring"]) == ["Add 1."]


def test_validation_file_is_the_held_out_part(tmp_path):
    files = {name: write(tmp_path / f"{name}.jsonl", pairs(5)) for name in ("train", "validation")}
    corpus = load_corpus(data_settings(train_file=files["train"], validation_file=files["validation"]))
    assert len(corpus["train"]) == len(corpus["validation"]) == 5


def test_text_files(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("\n".join(f"line {n}" for n in range(40)), encoding="utf-8")
    corpus = load_corpus(data_settings(train_file=str(path)))
    assert corpus["train"].column_names == ["text"]


def test_folder_of_a_data_set(tmp_path):
    write(tmp_path / "train.jsonl", pairs())
    corpus = load_corpus(data_settings(dataset_name=str(tmp_path)))
    assert corpus["train"].column_names == ["docstring", "code"]


def test_limits_are_kept(tmp_path):
    file = write(tmp_path / "train.jsonl", pairs())
    corpus = load_corpus(data_settings(train_file=file, max_train_samples=3, max_eval_samples=2))
    assert (len(corpus["train"]), len(corpus["validation"])) == (3, 2)


def test_unknown_columns_are_listed():
    with pytest.raises(ValueError, match=r"columns body, summary.*code and docstring.*text"):
        bimodal_columns(["body", "summary"])


BAD_FILES = [
    pytest.param("train.jsonl", "", "is empty", id="empty-file"),
    pytest.param("train.csv", "a,b", r"ends in \.csv.*\.parquet", id="unknown-ending"),
    pytest.param("train.jsonl", '{"code": "x"}\n' * 9, "has the columns code", id="missing-column"),
    pytest.param("train.jsonl", '{"code": "x", "docstr', "cannot be read", id="cut-off"),
    pytest.param("train.jsonl", '{"code": "x", "docstring": "y"}\n', "--validation_file", id="too-few-to-split"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_bad_files_raise(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_corpus(data_settings(train_file=str(tmp_path / name)))


def test_file_without_rows_raises(tmp_path):
    pandas.DataFrame({"code": [], "docstring": []}, dtype=str).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="no rows"):
        load_corpus(data_settings(train_file=str(tmp_path / "train.parquet")))


def test_files_of_two_kinds_raise(tmp_path):
    files = [write(tmp_path / "train.jsonl", pairs(3)), write(tmp_path / "held_out.parquet", pairs(3))]
    with pytest.raises(ValueError, match="different kinds"):
        load_corpus(data_settings(train_file=files[0], validation_file=files[1]))
