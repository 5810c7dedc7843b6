"""scripts/train_mnli.py: a run learns, resumes number for number, counts every pair, and reports what it measured."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

import train_mnli
from hf_comera import is_comera_model, size_report
from loop.callbacks import StepCosts
from mnli.trainer import PairTrainer
from tests.scripts.device_reads import ForbidWaiting, forbid_waiting

TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,initializer_range=0.2"
SCRIPT = Path(train_mnli.__file__)
WORDS = ("cat", "dog", "bird", "fish", "horse", "cow", "mouse", "sheep")
CLAIMS = {"entailment": "yes it is", "neutral": "maybe it is", "contradiction": "no it is"}


def rows(count, start=0):
    names = list(CLAIMS)
    return [
        {
            "premise": f"a {WORDS[n % 8]} and a {WORDS[n // 8 % 8]} number {n}",
            "hypothesis": f"{CLAIMS[names[n % 3]]} a {WORDS[n % 8]}",
            "label": names[n % 3],
        }
        for n in range(start, start + count)
    ]


def write(path, pairs):
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "a", "and", "number", "yes", "no", "maybe", "it", "is"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    wrapped.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def arguments(tokenizer_folder, tmp_path):
    files = {
        name: write(tmp_path / f"{name}.jsonl", rows(count, start))
        for name, count, start in (("train", 96, 0), ("validation", 21, 100), ("test", 19, 200))
    }
    return [
        *(part for name, path in files.items() for part in (f"--{name}_file", path)),
        "--tokenizer_name", tokenizer_folder, "--output_dir", str(tmp_path / "out"), "--config_overrides", TINY,
        "--max_length", "32", "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "8",
        "--gradient_accumulation_steps", "2", "--max_train_steps", "8", "--num_warmup_steps", "2", "--eval_steps", "3",
        "--rank", "4", "--num_threads", "1", "--use_cpu", "--learning_rate", "1e-2", "--logging_steps", "1",
    ]  # fmt: skip


def changed(arguments, name, value):
    place = arguments.index(f"--{name}")
    return [*arguments[: place + 1], str(value), *arguments[place + 2 :]]


def without(arguments, name):
    place = arguments.index(f"--{name}")
    return [*arguments[:place], *arguments[place + 2 :]]


def results(folder):
    return json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))


def plain_accuracy(folder, pairs):
    """Counted one pair at a time, with the model as a user loads it."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    right = 0
    for row in pairs:
        encoded = tokenizer(row["premise"], row["hypothesis"], return_tensors="pt", return_token_type_ids=True)
        with torch.no_grad():
            right += model.config.id2label[int(model(**encoded).logits.argmax())] == row["label"]
    return right / len(pairs)


FORMS = [pytest.param([], True, id="tensor-train"), pytest.param(["--dense"], False, id="dense")]


@pytest.mark.parametrize(("options", "compressed"), FORMS)
def test_learns_and_reports_the_kept_model(arguments, tmp_path, options, compressed):
    steady = f"{TINY},hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    arguments = changed(changed(arguments, "max_train_steps", 80), "config_overrides", steady)
    arguments = arguments if compressed else without(arguments, "rank")
    assert train_mnli.main([*arguments, *options]) == 0
    figures = results(tmp_path / "out")
    losses = [loss for _, loss in figures["losses"]]
    assert sum(losses[-10:]) / 10 < 0.5 * losses[0]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert is_comera_model(model) is compressed
    sizes = size_report(model)
    assert (figures["parameters"], figures["bytes"]) == (sizes.parameters, sizes.bytes)
    assert (figures["dense_ratio"] > 1) is (figures["tensorised_ratio"] > 1) is compressed
    best = max(accuracy for _, accuracy in figures["held_out_accuracies"])
    assert figures["accuracy"]["validation"] == best
    assert [figures["chosen_step"], best] in figures["held_out_accuracies"]


def test_every_pair_is_counted_in_the_accuracy(arguments, tmp_path):
    """21 and 19 pairs in batches of 8: the last batches are not full."""
    assert train_mnli.main(arguments) == 0
    figures = results(tmp_path / "out")
    assert figures["pairs"] == {"train": 96, "validation": 21, "test": 19}
    for name, pairs in (("validation", rows(21, 100)), ("test", rows(19, 200))):
        assert figures["accuracy"][name] == plain_accuracy(tmp_path / "out", pairs)


def interrupt_after(monkeypatch, step):
    """Send this process Ctrl-C in the middle of a step."""
    take_part = PairTrainer.training_step

    def part_and_signal(trainer, *args, **kwargs):
        if trainer.state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.undo()
        return take_part(trainer, *args, **kwargs)

    monkeypatch.setattr(PairTrainer, "training_step", part_and_signal)


def test_interrupted_run_resumes_number_for_number(arguments, tmp_path, monkeypatch, capsys):
    assert train_mnli.main(arguments) == 0
    expected = results(tmp_path / "out")
    other = changed(arguments, "output_dir", tmp_path / "other")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert train_mnli.main(other) == 130
    said = capsys.readouterr().out
    assert "scripts/train_mnli.py" in said
    assert "--resume_from_checkpoint latest" in said
    torch.manual_seed(12345)  # a new process would have another state as well
    assert train_mnli.main([*other, "--resume_from_checkpoint", "latest"]) == 0
    resumed = results(tmp_path / "other")
    assert len(resumed["losses"]) == 8
    for name in ("losses", "held_out_losses", "held_out_accuracies", "accuracy", "loss", "chosen_step"):
        assert resumed[name] == expected[name], name
    assert not list((tmp_path / "other").glob("checkpoint-*"))
    assert not (tmp_path / "other" / "best").exists()


def test_best_model_of_the_checkpoint_comes_back_with_it(arguments, tmp_path):
    """Resumed from a folder elsewhere, the model kept before the checkpoint is still there to be chosen."""
    first = [*changed(arguments, "learning_rate", "1e-9"), "--checkpointing_steps", "4"]  # step 0 stays the best
    assert train_mnli.main(first) == 0
    checkpoint = tmp_path / "out" / "checkpoint-4"
    again = changed(first, "output_dir", tmp_path / "other")
    assert train_mnli.main([*again, "--resume_from_checkpoint", str(checkpoint)]) == 0
    assert results(tmp_path / "other")["accuracy"] == results(tmp_path / "out")["accuracy"]
    assert results(tmp_path / "other")["losses"] == results(tmp_path / "out")["losses"]


def test_ranks_are_trained_and_resumed_across_cuts(arguments, tmp_path, monkeypatch, capsys):
    arguments = [*arguments, "--target_core_ratio", "0.4", "--eval_steps", "2"]
    shown, tracked = [], []
    with monkeypatch.context() as patch:
        patch.setattr("tqdm.auto.tqdm.set_postfix", lambda bar, names, **options: shown.append(names))
        patch.setattr(StepCosts, "on_log", lambda callback, *args, logs, **kwargs: tracked.append(logs))
        assert train_mnli.main([*changed(arguments, "output_dir", tmp_path / "whole")]) == 0
    assert {"loss", "held-out", "stage", "ranks", "parameters", "size"} <= shown[-1].keys()
    figures = {"loss", "smoothed_loss", "rank_stage", "live_ranks", "parameters", "relaxed_size"}
    assert any(figures <= names.keys() for names in tracked)
    printed = capsys.readouterr().out
    for what in ("parameters", "weights", "weights, gradients, optimizer state", "checkpoint of the training"):
        before, after = re.search(rf"│ {what} +│ +([\d,.]+)(?: MB)? +│ +([\d,.]+)", printed).groups()
        assert float(after.replace(",", "")) < float(before.replace(",", "")), what
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)  # of eight: the size is falling
        assert train_mnli.main(arguments) == 130
    assert train_mnli.main([*arguments, "--resume_from_checkpoint", "latest"]) == 0
    whole, resumed = results(tmp_path / "whole"), results(tmp_path / "out")
    assert whole["losses"] == resumed["losses"]
    assert whole["accuracy"] == resumed["accuracy"]
    assert whole["chosen_step"] >= 6  # no model counts before it has the wanted size
    sizes = whole["sizes"]
    assert sizes["gate_parameters"] == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    assert sizes["parameters"] == sum(p.numel() for p in model.parameters())
    uncut = tmp_path / "uncut"
    assert train_mnli.main([*changed(arguments, "output_dir", uncut), "--target_core_ratio", "1"]) == 0
    cores = results(uncut)["sizes"]["compressed_parameters"]
    assert 0.3 * cores < sizes["compressed_parameters"] <= 0.4 * cores
    assert (tmp_path / "whole" / "ranks.png").exists()


@pytest.mark.parametrize(("option", "wanted"), [("target_ratio", 0.655), ("target_parameters", 17_400)])
def test_the_wanted_size_is_that_of_the_whole_model(arguments, tmp_path, option, wanted):
    assert train_mnli.main([*arguments, f"--{option}", str(wanted)]) == 0
    sizes = results(tmp_path / "out")["sizes"]
    wanted = wanted * sizes["dense_parameters"] if wanted < 1 else wanted
    assert wanted - 200 < sizes["parameters"] <= wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target_ratio", "0.1", "--target_parameters", "100"], "are given. Give the one that you know"),
        (["--target_core_ratio", "1.5"], "--target_core_ratio 1.5 must be above 0 and at most 1"),
        (["--target_ratio", "0"], "target_ratio=0.0 is the wanted part of the dense parameters"),
        (["--target_parameters", "10"], "target_parameters=10 asks for 10 parameters, but"),
        (["--target_core_ratio", "1e-5"], r"--target_core_ratio 1e-05: target_parameters=\d+ asks for"),
        (["--adapt_ranks", "--early_stage", "7", "--late_stage", "7"], "early=7 and late=7 are 7 and 7 steps"),
        (["--adapt_ranks", "--early_stage", "1.5"], r"--early_stage 1\.5 is neither a part of the training"),
        (["--adapt_ranks", "--late_stage", "-1"], "--late_stage -1 is neither a part of the training"),
    ],
)
def test_ranks_that_cannot_be_had_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        train_mnli.main([*arguments, *options])


def test_a_dense_model_has_no_ranks(arguments):
    with pytest.raises(ValueError, match="--adapt_ranks is for tensor trains, which --dense has none of"):
        train_mnli.main([*without(arguments, "rank"), "--dense", "--adapt_ranks"])


def test_rows_are_added_and_those_of_the_same_run_replaced(arguments, tmp_path):
    path = tmp_path / "figures" / "rows.csv"
    short = [*changed(arguments, "max_train_steps", 1), "--results_file", str(path), "--overwrite_output_dir"]
    for seed in ("1", "2", "2"):
        assert train_mnli.main([*short, "--seed", seed]) == 0
    with path.open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [row["seed"] for row in written] == ["1", "2"]
    assert float(written[1]["accuracy_test"]) == pytest.approx(results(tmp_path / "out")["accuracy"]["test"], abs=1e-5)
    assert written[0]["shapes"] == "rank 4"


def test_checkpoints_of_other_data_are_refused(arguments, tmp_path):
    assert train_mnli.main([*arguments, "--checkpointing_steps", "4"]) == 0
    other = changed(arguments, "train_file", write(tmp_path / "other.jsonl", rows(96, 300)))
    with pytest.raises(ValueError, match=r"data was .* is "):
        train_mnli.main([*other, "--resume_from_checkpoint", "latest"])


@pytest.mark.slow
def test_two_processes_count_each_pair_once(arguments, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    sources = {"PYTHONPATH": str(SCRIPT.parents[1])}
    finished = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=os.environ | sources, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    figures = results(tmp_path / "out")
    assert len(figures["losses"]) == 8
    for name, pairs in (("validation", rows(21, 100)), ("test", rows(19, 200))):
        assert figures["accuracy"][name] == plain_accuracy(tmp_path / "out", pairs)


def test_no_step_waits_for_the_device(arguments, monkeypatch):
    forbid_waiting(monkeypatch)
    watch = ForbidWaiting()
    monkeypatch.setattr(train_mnli, "StepCosts", lambda: watch)
    assert train_mnli.main([*arguments, "--logging_steps", "3", "--max_grad_norm", "0.5"]) == 0
    assert watch.steps == list(range(1, 9))
