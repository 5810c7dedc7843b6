"""benchmarks/quality/run.py: every task trains and leaves a row and a curve; runs are done once, and named once."""

import csv
import json

import pytest
import torch
from datasets import Dataset

from benchmarks.quality import run as quality_run
from benchmarks.quality.results import CURVES, ROWS, Results

LABELS = ("entailment", "neutral", "contradiction")
WORDS = ("the", "dog", "cat", "sleeps", "runs", "not", "a", "house")


def rows_of(folder, name=ROWS):
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small files of the kinds that the tasks read."""
    folder = tmp_path_factory.mktemp("data")
    functions = [
        {"code": f"def f{n}(x):\n    y = x + {n}\n    return y", "docstring": f"Add {n}.", "split": split}
        for split, number in (("train", 40), ("valid", 8))
        for n in range(number)
    ]
    Dataset.from_list(functions).to_parquet(folder / "code.parquet")
    pairs = [
        {"premise": f"the {WORDS[n % 8]} sleeps", "hypothesis": "a cat " * (1 + n % 5), "label": LABELS[n % 3]}
        | {"fold": fold}
        for fold, number in (("train", 130), ("valid", 9), ("test", 9))
        for n in range(number)
    ]
    Dataset.from_list(pairs).to_parquet(folder / "pairs.parquet")
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
    (tokenizer / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    (tokenizer / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


@pytest.fixture
def arguments(tmp_path):
    return [
        "--widths",
        "16",
        "--update",
        "adamw",
        "--lr",
        "1e-3",
        "--ranks",
        "4",
        "--threads",
        "1",
        "--results_dir",
        str(tmp_path),
    ]


def files(task, data):
    nli = ["--nli_file", str(data / "pairs.parquet"), "--tokenizer", str(data / "tokenizer")]
    return {"bytes": [], "code": ["--code_file", str(data / "code.parquet")], "nli": nli}[task]


@pytest.mark.parametrize(("task", "length"), [("bytes", ["--steps", "3"]), ("code", ["--epochs", "1"]), ("nli", [])])
def test_every_task_leaves_a_row_and_a_curve(task, length, data, arguments, tmp_path, capsys):
    steps = {"bytes": 3, "code": 2, "nli": 10}[task]
    assert quality_run.main([task, *files(task, data), *length, *arguments]) == 0
    dense, tensor_train = rows_of(tmp_path)
    for row in (dense, tensor_train):
        assert (row["status"], row["steps"], row["steps_done"]) == ("complete", str(steps), str(steps))
        assert 0 < float(row["held_out_loss"]) < 10
        assert bool(row["accuracy"]) is (task == "nli")
        assert 0 < float(row["optimizer_share"]) < 1
        # weights, gradients and AdamW's two states; a counter of each parameter besides
        assert 16 * int(row["parameters"]) < int(row["training_bytes"]) < 17 * int(row["parameters"])
        points = [point for point in rows_of(tmp_path, CURVES) if point["run"] == row["run"]]
        assert [int(point["step"]) for point in points] == list(range(1, steps + 1))
        assert points[-1]["held_out_loss"] == row["held_out_loss"]
        assert str(tmp_path) not in row["command"]
        assert str(data) not in row["command"]
    assert (dense["form"], dense["rank"], tensor_train["form"], tensor_train["rank"]) == ("dense", "", "tt", "4")
    assert int(tensor_train["compared_parameters"]) < int(dense["compared_parameters"])
    assert "tt, rank 4, adamw" in capsys.readouterr().out


VARIANTS = [
    ["--num_factors", "2", "--ranks", "full"],
    ["--form", "dense", "--update", "muon"],
    ["--update", "muon"],
]


@pytest.mark.parametrize("options", VARIANTS)
def test_variants_learn(options, arguments, tmp_path):
    length = ["--steps", "12", "--other_lr", "1e-2", "--form", "tt"]
    assert quality_run.main(["bytes", *arguments, *length, *options]) == 0
    (row,) = rows_of(tmp_path)
    first = rows_of(tmp_path, CURVES)[0]
    assert float(row["training_loss"]) < float(first["training_loss"]) - 0.1


def test_runs_that_have_a_row_are_skipped(arguments, tmp_path, monkeypatch, capsys):
    command = ["bytes", "--form", "dense", "--steps", "2", *arguments]
    quality_run.main(command)
    before = rows_of(tmp_path)
    trained = []
    monkeypatch.setattr(quality_run, "measure", lambda task, run, *_: trained.append(run) or pytest.fail("trained"))
    quality_run.main([*command, "--ranks", "8"])  # a dense run has no rank: the same run
    assert rows_of(tmp_path) == before
    assert "1 of 1 skipped, its row is there: bytes: dense" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception):
        quality_run.main([*command, "--seed", "1"])
    assert [run.seed for run in trained] == [1]


def test_runs_of_another_process_are_left_to_it(arguments, tmp_path, monkeypatch, capsys):
    command = ["bytes", "--form", "dense", "--steps", "2", *arguments]
    quality_run.main(command)
    (row,) = rows_of(tmp_path)
    (tmp_path / ROWS).unlink()
    with Results(tmp_path).claim(row["run"]) as claimed:
        assert claimed
        quality_run.main([*command, "--seeds", "0", "1"])
    assert "1 of 2 skipped, another process is at it" in capsys.readouterr().out
    assert [row["seed"] for row in rows_of(tmp_path)] == ["1"]


def test_a_run_that_diverges_has_a_row_that_says_so(arguments, tmp_path, capsys):
    quality_run.main(["bytes", "--steps", "9", *arguments, "--lr", "1e30", "--other_lr", "1e30"])
    for row in rows_of(tmp_path):
        assert (row["status"], row["held_out_loss"], row["training_loss"]) == ("diverged", "", "")
        assert 0 < int(row["steps_done"]) < 9
    assert "diverged 1 of 1" in capsys.readouterr().out


def test_equal_seconds_change_the_steps_of_tensor_trains_only(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(quality_run, "seconds_ratio", lambda task, run, rounds: 1.5)
    quality_run.main(["bytes", "--steps", "4", "--like_seconds_of", "dense", *arguments])
    found = [
        (row["form"], row["steps"], row["budget"], row["steps_done"], row["step_ratio"]) for row in rows_of(tmp_path)
    ]
    assert found == [("dense", "4", "steps", "4", ""), ("tt", "4", "seconds of dense", "6", "1.5")]


def test_equal_bytes_make_the_dense_model_narrower(arguments, tmp_path):
    quality_run.main(["bytes", "--steps", "2", "--like_bytes_of", "tt", *arguments, "--widths", "32"])
    dense, tensor_train = rows_of(tmp_path)
    assert (dense["budget"], dense["rank"], dense["width"]) == ("bytes of tt", "4", "32")
    assert int(dense["model_width"]) < 32
    assert int(dense["training_bytes"]) <= int(tensor_train["training_bytes"])


def test_the_same_seed_gives_the_same_losses(arguments, tmp_path):
    command = ["bytes", "--form", "tt", "--steps", "3", *arguments]
    losses = []
    for start in (1, 2):
        torch.manual_seed(start)
        quality_run.main([*command, "--results_dir", str(tmp_path / str(start))])
        losses.append([point["training_loss"] for point in rows_of(tmp_path / str(start), CURVES)])
    assert losses[0] == losses[1]


def test_the_command_names_files_without_their_folders(data, tmp_path):
    words = ["code", f"--code_file={data / 'code.parquet'}", "--results_dir", str(tmp_path), "--lrs", "0.1"]
    command = quality_run.command(words, quality_run.parse_settings(words))
    assert (
        command
        == f"python -m benchmarks.quality.run code --code_file=code.parquet --results_dir {tmp_path.name} --lrs 0.1"
    )
