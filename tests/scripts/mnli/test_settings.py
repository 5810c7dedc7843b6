"""scripts/mnli/settings.py: every setting has help, and what cannot work is refused before anything is loaded."""

import csv
import re

import pytest

from benchmarks.harness.timing import RESULTS
from mnli.settings import DENSE_RATE, RATE, parse_settings

HUB = ["--dataset_name", "nyu-mll/glue", "--dataset_config", "mnli"]


def test_rate_follows_the_form():
    assert parse_settings(HUB).training.learning_rate == RATE
    assert parse_settings([*HUB, "--dense"]).training.learning_rate == DENSE_RATE
    assert parse_settings([*HUB, "--dense", "--learning_rate", "0.1"]).training.learning_rate == 0.1


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    text = capsys.readouterr().out
    for name in parse_settings(HUB).as_dict():
        assert f"--{name}" in text


def test_help_says_what_the_kept_rows_are_of(capsys):
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    with (RESULTS / "train_mnli.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    widths = {int(re.match(r"hidden_size=(\d+),num_hidden_layers=4,", row["config_overrides"])[1]) for row in rows}
    assert f"four encoders, at most {max(widths)} wide" in text
    assert "not of MNLI" in text
    assert {row["data"] for row in rows} == {"nli3_combined.parquet"}


REFUSED = [
    ([], "No data given, but the pairs must come from one source: --dataset_name nyu-mll/glue"),
    ([*HUB, "--train_file", "a.csv"], "--dataset_name nyu-mll/glue and --train_file a.csv given"),
    ([*HUB, "--data_file", "a.csv"], "--dataset_name nyu-mll/glue and --data_file a.csv given"),
    ([*HUB, "--test_file", "a.csv"], "--test_file a.csv needs --train_file beside it, not --dataset_name"),
    (["--train_file", "a.csv", "--dataset_config", "mnli"], "--dataset_config mnli needs --dataset_name"),
    (["--train_file", "nowhere.csv"], "nowhere.csv is not a file here"),
    ([*HUB, "--dense", "--rank", "8"], "--rank 8 is of tensor trains"),
    ([*HUB, "--rank", "0"], "--rank 0 must be greater than 0"),
    ([*HUB, "--learning_rate", "0"], "--learning_rate 0.0 must be greater than 0"),
    ([*HUB, "--max_length", "4"], "--max_length 4 leaves no room.*at least 8"),
    ([*HUB, "--validation_split_percentage", "100"], "between 0 and 100"),
    ([*HUB, "--num_warmup_steps", "-1"], "must be 0 or greater"),
    ([*HUB, "--target-core-ratoi=2"], "--target-core-ratoi is not an option here. Did you mean --target_core_ratio?"),
    ([*HUB, "--learning", "1e-3"], "--learning is not an option here. Did you mean --learning_rate?"),
    ([*HUB, "--early_stage", "0.2"], "--early_stage 0.2 is of rank adaptation, which nothing asks for"),
    ([*HUB, "mnli"], "mnli is not an option here."),
]


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else ""
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(arguments)
