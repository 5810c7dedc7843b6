"""hf_comera/cli/export.py: ONNX with a tokenizer, a dense folder with the command to go on, or no folder at all."""

import pytest
import torch
from transformers import AutoModelForMaskedLM

from hf_comera.cli import export


@pytest.mark.parametrize("options", [[], ["--merged"]], ids=["compressed", "merged"])
def test_onnx_is_written_with_its_tokenizer(options, checkpoints, tmp_path, call):
    onnxruntime = pytest.importorskip("onnxruntime")
    found = call("export", checkpoints / "compressed", tmp_path / "out", *options, "--json").json()
    assert found["error"] < 1e-4
    assert found["inputs"] == ["input_ids", "attention_mask"]
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    ids = torch.arange(12).view(3, 4)
    model = AutoModelForMaskedLM.from_pretrained(checkpoints / "compressed").eval()
    logits = session.run([found["output"]], {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()})
    torch.testing.assert_close(torch.from_numpy(logits[0]), model(ids).logits, rtol=1e-4, atol=1e-5)
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_dense_folder_comes_with_the_commands_to_go_on(checkpoints, tmp_path, call):
    answer = call("export", checkpoints / "gpt2", tmp_path / "out", "--format", "dense")
    assert answer.code == 0, answer.error
    assert f"vllm serve {tmp_path / 'out'}" in answer.out
    assert f"convert_hf_to_gguf.py {tmp_path / 'out'} --outfile {tmp_path / 'out'}.gguf" in answer.out
    encoder = call("export", checkpoints / "compressed", tmp_path / "other", "--format", "dense", "--json").json()
    assert "BertForMaskedLM.from_pretrained" in encoder["go_on"][0]


def test_an_export_that_fails_leaves_nothing(checkpoints, tmp_path, call, monkeypatch):
    def fail(model, path):
        path.write_text("half")
        raise ValueError("torch.onnx.export does not follow BertForMaskedLM")

    monkeypatch.setattr(export, "export_onnx", fail)
    answer = call("export", checkpoints / "compressed", tmp_path / "out")
    assert answer.code == 2
    assert "does not follow" in answer.said
    assert not list(tmp_path.iterdir())


def test_a_format_that_is_none_is_refused(checkpoints, tmp_path, call):
    answer = call("export", checkpoints / "compressed", tmp_path / "out", "--format", "gguf")
    assert answer.code == 2
    assert "'onnx', 'dense'" in answer.said
