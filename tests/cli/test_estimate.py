"""hf_comera/cli/estimate.py: memory and time of steps of both models, from the config alone."""

import dataclasses

import pytest

from hf_comera import ComeraConfig, estimate_memory, get_comera_model
from tests.architectures import ARCHITECTURES

GIVEN = ["--tflops", "0.1", "--bandwidth", "10"]


def test_is_what_the_library_estimates_of_live_models(checkpoints, call):
    found = call("estimate", checkpoints / "dense", "--batch", "2x16", "--rank", "4", *GIVEN, "--json").json()
    dense = ARCHITECTURES["bert-mlm"].new_model()
    sizes = {"batch_size": 2, "seq_len": 16}
    expected = dataclasses.asdict(estimate_memory(dense, policies={"none": None}, **sizes))
    assert found["memory_bytes"]["dense"] == expected
    compressed = get_comera_model(dense, ComeraConfig(rank=4))
    expected = dataclasses.asdict(estimate_memory(compressed, policies=["rank", "rank+fp8"], **sizes))
    assert found["memory_bytes"]["compressed"]["policies"]["rank"] == expected["policies"]["rank"]
    assert found["memory_bytes"]["compressed"]["weights"] == expected["weights"]
    step = found["predicted_step"]
    assert found["predicted_speedup"] == pytest.approx(step["dense"]["seconds"] / step["compressed"]["seconds"], 1e-3)
    assert step["dense"]["rates"] == {"flops": 1e11, "bytes": 1e10}


def test_tables_say_that_times_are_predicted_and_of_what(checkpoints, call):
    answer = call("estimate", checkpoints / "compressed", "-b", "2x16")
    assert answer.code == 0
    assert "Memory of a training step, predicted, 2x16" in answer.out
    assert "Time of a training step, predicted, 2x16" in answer.out
    assert "measured here now" in answer.out
    assert [line.split()[0] for line in answer.out.splitlines() if "FLOP " in line] == ["dense", "tensor"]
    assert max(map(len, answer.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "8"], "--batch 8 is no batch. Needed are rows and tokens, for example --batch 8x512"),
        (["--batch", "2x4096"], "seq_len=4096 is more than the 512 positions"),
        (["--autocast", "int8"], "--autocast int8 is no dtype of autocast. Use --autocast bf16"),
        (["--tflops", "3"], "give both, as --tflops 60 --bandwidth 3000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(options, words, checkpoints, call):
    answer = call("estimate", checkpoints / "dense", *options)
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.said


def test_a_model_without_a_loss_is_refused(checkpoints, call):
    answer = call("estimate", checkpoints / "dense", "--class", "AutoModel", *GIVEN)
    assert answer.code == 2
    assert "BertModel takes no labels" in answer.said
