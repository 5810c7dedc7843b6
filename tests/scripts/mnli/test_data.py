"""scripts/mnli/data.py: every pair has its part, none is lost unsaid, and bad files are refused."""

import json

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from mnli.data import load_pairs, make_parts
from mnli.settings import DataSettings

LABELS = ("entailment", "neutral", "contradiction")


def pairs(count, **columns):
    made = {
        "premise": [f"premise {n // 3}" for n in range(count)],
        "hypothesis": [f"hypothesis {n}" for n in range(count)],
        "label": [LABELS[n % 3] for n in range(count)],
    }
    return Dataset.from_dict(made | columns)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_without_test_labels_the_validation_sets_are_the_test():
    """As in MNLI of GLUE: labels are numbers of a ClassLabel, those of the test sets are -1."""
    features = Features({"premise": Value("string"), "hypothesis": Value("string"), "label": ClassLabel(names=LABELS)})
    numbered = pairs(900, label=[n % 3 for n in range(900)]).cast(features)
    secret = pairs(9, label=[-1] * 9).cast(features)
    splits = {
        "train": numbered,
        "validation_matched": numbered.select(range(30)),
        "validation_mismatched": numbered.select(range(40)),
        "test_matched": secret,
    }
    parts = make_parts(splits, DataSettings(validation_split_percentage=10))
    assert {name: len(rows) for name, rows in parts.tests.items()} == {
        "validation_matched": 30,
        "validation_mismatched": 40,
    }
    assert len(parts.train) + len(parts.validation) == 900
    assert 45 < len(parts.validation) < 150
    assert not set(parts.train["premise"]) & set(parts.validation["premise"])
    assert any("Left out of test_matched: 9 of 9 pairs" in note for note in parts.notes)


def test_given_parts_are_taken_as_they_are():
    parts = make_parts({"train": pairs(9), "validation": pairs(6), "test": pairs(3)}, DataSettings())
    assert [len(parts.train), len(parts.validation), len(parts.tests["test"])] == [9, 6, 3]
    assert parts.train["label"][:4] == [0, 1, 2, 0]
    assert parts.notes == []


def test_folder_is_a_data_set(tmp_path):
    for name, count in (("train", 9), ("validation", 6), ("test", 3)):
        pairs(count).to_json(tmp_path / f"{name}.jsonl")
    parts = load_pairs(DataSettings(dataset_name=str(tmp_path)))
    assert [len(parts.train), len(parts.validation), len(parts.tests["test"])] == [9, 6, 3]


def test_missing_data_set_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"(?s)--dataset_name .* cannot be loaded.*for example --dataset_name nyu-mll"
    ):
        load_pairs(DataSettings(dataset_name=str(tmp_path / "nowhere")))


def test_splits_without_a_part_are_named():
    splits = {"train": pairs(9), "validation": pairs(6), "test": pairs(3), "extra": pairs(3)}
    assert make_parts(splits, DataSettings()).notes == ["Not used, as neither train, validation nor test: extra."]


@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_one_file_with_folds(tmp_path, ending):
    folds = ["train"] * 6 + ["valid"] * 3 + ["test"] * 3
    data, path = pairs(12, fold=folds), str(tmp_path / f"pairs.{ending}")
    writers = {
        "csv": data.to_csv,
        "tsv": lambda path: data.to_csv(path, sep="\t"),
        "parquet": data.to_parquet,
    }
    writers.get(ending, data.to_json)(path)
    parts = load_pairs(DataSettings(data_file=path))
    assert [len(parts.train), len(parts.validation), len(parts.tests["test"])] == [6, 3, 3]
    assert parts.validation["label"] == [0, 1, 2]


UNLABELLED = [["entailment", "-", None, ""], ["0", "-1", "", "-"], ["Neutral", None, None, "-"]]


@pytest.mark.parametrize("labels", UNLABELLED)
def test_unlabelled_pairs_are_counted_and_said(labels):
    parts = make_parts({"train": pairs(4, label=labels), "dev": pairs(3), "test": pairs(3)}, DataSettings())
    assert len(parts.train) == 1
    assert parts.notes == ["Left out of train: 3 of 4 pairs, without a label."]


def test_numbers_with_gaps_become_floats_in_csv_and_still_count(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("premise,hypothesis,label\na,b,2\nc,d,\ne,f,0\n", encoding="utf-8")
    other = write(tmp_path / "other.jsonl", [{"premise": "a", "hypothesis": "b", "label": 1}])
    parts = load_pairs(DataSettings(train_file=str(path), validation_file=other, test_file=other))
    assert parts.train["label"] == [2, 0]
    assert parts.validation["label"] == [1]


GOOD = {"premise": "a", "hypothesis": "b", "label": "neutral"}
REFUSED = [
    pytest.param([{"premise": "a", "label": 0}], r"columns premise, label, but not hypothesis\. Needed", id="column"),
    pytest.param(
        [GOOD, GOOD | {"label": "perhaps"}],
        r"Row 1 of train has label='perhaps', which is no class\. Needed: entailment, .*label=neutral",
        id="label",
    ),
    pytest.param([GOOD | {"label": 3}], "Row 0 of train has label=3, which is no class", id="number"),
    pytest.param([GOOD | {"premise": None}, GOOD], "Row 0 of train has premise=None. Each row needs text", id="text"),
    pytest.param([GOOD | {"label": None}, GOOD | {"label": "-"}], "labelled pairs in no split, but needs", id="none"),
    pytest.param([], "train.jsonl is empty. It needs rows with premise, hypothesis, label", id="empty"),
    pytest.param([GOOD] * 5, "--validation_split_percentage 2 takes none of the 5 training pairs", id="few"),
]


@pytest.mark.parametrize(("rows", "message"), REFUSED)
def test_refused_files(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load_pairs(DataSettings(train_file=write(tmp_path / "train.jsonl", rows)))


FOLDS = [
    ("part", ["train"], "--fold_column part is no column of .* which has premise, hypothesis, label, fold"),
    ("fold", ["train", "holdout"], "--fold_column fold of .* says holdout. Each pair needs train, test, or one of"),
]


@pytest.mark.parametrize(("column", "folds", "message"), FOLDS)
def test_refused_folds(tmp_path, column, folds, message):
    path = str(tmp_path / "pairs.parquet")
    pairs(len(folds), fold=folds).to_parquet(path)
    with pytest.raises(ValueError, match=message):
        load_pairs(DataSettings(data_file=path, fold_column=column))


def test_unknown_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"pairs.xml ends in .xml. Known endings: .csv"):
        load_pairs(DataSettings(train_file=str(tmp_path / "pairs.xml")))
