"""hf_comera/cli/compress.py: a dense folder becomes a compressed one with its tokenizer, or nothing changes."""

import re
import shutil

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from hf_comera import ComeraConfig, calibrate, get_comera_model, is_comera_model
from hf_comera.hub.source import ModelSource
from tests.architectures import VOCABULARY


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_writes_what_get_comera_model_makes(checkpoints, tmp_path, call):
    answer = call("compress", checkpoints / "dense", tmp_path / "out", "--rank", "4")
    assert answer.code == 0, answer.error
    found = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    dense = AutoModelForMaskedLM.from_pretrained(checkpoints / "dense").eval()
    expected = get_comera_model(dense, ComeraConfig(rank=4))
    assert is_comera_model(found)
    ids = torch.arange(18).view(2, 9)
    torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").mask_token == "w1"
    assert names(tmp_path) == {"out"}


def test_prints_errors_and_what_to_do_about_them(checkpoints, tmp_path, call):
    answer = call("compress", checkpoints / "dense", tmp_path / "out", "--rank", "4", "--target", "query")
    errors = [float(number) for number in re.findall(r"\b0\.\d+", answer.out)]  # a narrow table wraps names
    assert errors
    assert 0.5 < min(errors) <= max(errors) < 1
    (note,) = [line for line in answer.said.split("Note: ") if "plain TT-SVD" in line]
    assert "needs training afterwards" in note
    found = call("compress", checkpoints / "dense", tmp_path / "out", "--rank", "4", "--overwrite", "--json").json()
    assert all(0 < layer["error"] < 1 for layer in found["layers"])


def test_a_folder_that_is_not_empty_needs_overwrite(checkpoints, tmp_path, call):
    (tmp_path / "notes.txt").write_text("mine")
    answer = call("compress", checkpoints / "dense", tmp_path, "--rank", "4")
    assert answer.code == 2
    assert "is not empty (notes.txt). Give a new folder, or add --overwrite" in answer.said
    assert names(tmp_path) == {"notes.txt"}
    assert call("compress", checkpoints / "dense", tmp_path, "--rank", "4", "--overwrite").code == 0
    assert {"notes.txt", "config.json", "model.safetensors"} <= names(tmp_path)


def test_the_source_is_never_written_over(checkpoints, tmp_path, call):
    shutil.copytree(checkpoints / "dense", tmp_path / "model")
    answer = call("compress", tmp_path / "model", tmp_path / "model", "--overwrite")
    assert answer.code == 2
    assert "is the folder that is read" in answer.said


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("dens", "Did you mean"),
        ("compressed", "is compressed already. See its layers: hf-comera inspect"),
        ("dense/config.json", "is a config, and weights are needed. Give the folder of a checkpoint"),
    ],
)
def test_what_cannot_be_compressed(source, words, checkpoints, tmp_path, call):
    answer = call("compress", checkpoints / source, tmp_path / "out")
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.said
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_nothing(checkpoints, tmp_path, call, monkeypatch):
    def fail(self, folder):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(ModelSource, "copy_tokenizer", fail)
    answer = call("compress", checkpoints / "dense", tmp_path / "out", "--rank", "4")
    assert answer.code == 1
    assert "The model could not be saved" in answer.said
    assert not list(tmp_path.iterdir())


STORED = {
    "int8": (["int8"], "int8"),
    "a table in int4": (["int8", "word_embeddings=int4"], {"*": "int8", "word_embeddings": "int4"}),
    "one layer": (["query=int4"], {"query": "int4"}),
}


@pytest.mark.parametrize(("given", "expected"), STORED.values(), ids=STORED.keys())
def test_storage_goes_into_the_checkpoint_and_is_shown(given, expected, checkpoints, tmp_path, call):
    options = [part for text in given for part in ("--storage", text)]
    answer = call("compress", checkpoints / "dense", tmp_path / "out", "--rank", "8", *options)
    assert answer.code == 0, answer.error
    assert "B of weights." in answer.out
    found = call("inspect", tmp_path / "out", "--json").json()
    assert found["provenance"]["storage"] == expected
    assert set(found["dtypes"]) & {"I8", "U8"}
    shown = expected if isinstance(expected, str) else ", ".join(f"{k}={v}" for k, v in sorted(expected.items()))
    assert f"- storage: {shown}" in call("inspect", tmp_path / "out").out
    merged = call("merge", tmp_path / "out", tmp_path / "dense", "--json").json()
    assert merged["bytes"] > found["bytes"]
    ids = torch.arange(18).view(2, 9)
    models = [AutoModelForMaskedLM.from_pretrained(tmp_path / name).eval() for name in ("out", "dense")]
    torch.testing.assert_close(models[0](ids).logits, models[1](ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["int3"], "storage='int3' is needed as 'float', 'int8', 'int4'"),
        (["int8", "int4"], "says two things of the same layers"),
        (["=int4"], "or names none"),
        (["no_such_layer=int4"], "'no_such_layer' matches no layer"),
    ],
    ids=str,
)
def test_bad_storage_is_refused(given, message, checkpoints, tmp_path, call):
    options = [part for text in given for part in ("--storage", text)]
    answer = call("compress", checkpoints / "dense", tmp_path / "out", *options)
    assert answer.code == 2
    assert message in answer.said
    assert not (tmp_path / "out").exists()


@pytest.fixture
def trained(checkpoints, tmp_path):
    """A dense BERT whose tokenizer can pad, and a file of texts."""
    shutil.copytree(checkpoints / "dense", tmp_path / "dense")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    tokenizer.pad_token = "w0"
    tokenizer.save_pretrained(tmp_path / "dense")
    texts = [" ".join(f"w{(7 * row + 3 * column) % VOCABULARY}" for column in range(12)) for row in range(200)]
    (tmp_path / "texts.txt").write_text("\n".join([*texts, "", " "]), encoding="utf-8")
    return tmp_path / "dense", tmp_path / "texts.txt", texts


def test_a_calibration_and_a_budget_give_what_the_functions_give(trained, tmp_path, call):
    folder, file, texts = trained
    answer = call("compress", folder, tmp_path / "out", "--calibrate", file, "--budget", "0.5")
    assert answer.code == 0, answer.error
    assert "can now teach this one" in answer.said
    found = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    dense = AutoModelForMaskedLM.from_pretrained(folder).eval()
    calibration = calibrate(dense, texts, processing_class=AutoTokenizer.from_pretrained(folder))
    expected = get_comera_model(dense, ComeraConfig(target_ratio=0.5), calibration=calibration)
    ids = torch.arange(18).view(2, 9)
    torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_budget_of_bytes_is_that_of_the_storage(trained, tmp_path, call):
    folder, file, _ = trained
    options = ["--calibrate", file, "--storage", "int8"]
    whole = call("compress", folder, tmp_path / "whole", *options, "--rank", "4", "--json")
    assert whole.code == 0, whole.error
    wanted = (tmp_path / "whole" / "model.safetensors").stat().st_size + 2_000
    answer = call("compress", folder, tmp_path / "out", *options, "--budget", f"{wanted / 1000}kB")
    assert answer.code == 0, answer.error
    assert wanted - 8_000 < (tmp_path / "out" / "model.safetensors").stat().st_size <= wanted


BAD_CALIBRATIONS = [
    (["--budget", "0.5"], "--budget 0.5 needs texts"),
    (["--calibrate", "texts.txt", "--budget", "5X"], "--budget 5X is no size"),
    (["--calibrate", "nowhere.txt"], "is not a file here"),
    (["--calibrate", "empty.txt"], "holds no text"),
    (["--calibrate", "dense/model.safetensors"], "is no text in UTF-8"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CALIBRATIONS, ids=str)
def test_bad_calibrations_are_refused(options, message, trained, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    answer = call("compress", "dense", tmp_path / "out", *options)
    assert answer.code == 2
    assert message in answer.said
    assert not (tmp_path / "out").exists()


def test_a_calibration_needs_a_tokenizer_that_pads(checkpoints, trained, tmp_path, call):
    answer = call("compress", checkpoints / "dense", tmp_path / "out", "--calibrate", trained[1])
    assert answer.code == 2
    assert "no token for padding" in answer.said
