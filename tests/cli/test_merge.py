"""hf_comera/cli/merge.py: the dense checkpoint loads without hf_comera and computes the same."""

import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

LOADED_ELSEWHERE = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1]).eval()
AutoTokenizer.from_pretrained(sys.argv[1])
assert "hf_comera" not in sys.modules
save_file({"logits": model(torch.arange(18).view(2, 9)).logits.detach()}, sys.argv[2])
"""


def test_loads_without_hf_comera_and_computes_the_same(checkpoints, tmp_path, call):
    answer = call("merge", checkpoints / "compressed", tmp_path / "out")
    assert answer.code == 0, answer.error
    assert "dense BertForMaskedLM" in answer.out
    program = [sys.executable, "-c", LOADED_ELSEWHERE, str(tmp_path / "out"), str(tmp_path / "logits")]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = AutoModelForMaskedLM.from_pretrained(checkpoints / "compressed").eval()
    logits = load_file(tmp_path / "logits")["logits"]
    torch.testing.assert_close(logits, model(torch.arange(18).view(2, 9)).logits, rtol=1e-4, atol=1e-5)


def test_overwriting_a_compressed_model_leaves_a_dense_one(checkpoints, tmp_path, call):
    out = tmp_path / "out"
    out.mkdir()
    save_file({"core_0": torch.zeros(1)}, out / "model-00001-of-00002.safetensors")
    found = call("merge", checkpoints / "compressed", out, "--overwrite", "--json").json()
    assert found["bytes"] == (out / "model.safetensors").stat().st_size
    assert not (out / "model-00001-of-00002.safetensors").exists()


def test_a_dense_model_is_refused(checkpoints, tmp_path, call):
    answer = call("merge", checkpoints / "dense", tmp_path / "out")
    assert answer.code == 2
    assert "is dense already: there is nothing to merge" in answer.said
    assert not list(tmp_path.iterdir())
