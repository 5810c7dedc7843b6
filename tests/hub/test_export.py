"""hf_comera/hub/export.py: an ONNX file that was compared with the model, or an error that says what to try."""

import sys

import pytest
import torch

from hf_comera import ComeraConfig, export_onnx, get_comera_model
from tests.architectures import ARCHITECTURES


def model_of(name):
    architecture = ARCHITECTURES[name]
    config = architecture.new_config()
    config.num_hidden_layers = 1
    return get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=config)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("bert-mlm", ("input_ids", "attention_mask")),
        ("gpt2", ("input_ids", "attention_mask")),
        ("vit", ("pixel_values",)),
    ],
)
def test_the_file_computes_what_the_model_does(name, inputs, tmp_path):
    model = model_of(name).train()
    found = export_onnx(model, tmp_path / "model.onnx")
    assert found.error < 1e-4
    assert (found.inputs, found.output) == (inputs, "logits")
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert model.training
    assert getattr(model.config, "use_cache", True)


def test_a_file_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    model, exported = model_of("bert-mlm"), torch.onnx.export

    def export_and_change(model, *arguments, **options):
        exported(model, *arguments, **options)
        model.get_parameter("bert.encoder.layer.0.output.dense.bias").data[0] += 9

    monkeypatch.setattr(torch.onnx, "export", export_and_change)
    with pytest.raises(ValueError, match=r"2 x 16 ONNX Runtime computes something else than BertForMaskedLM"):
        export_onnx(model, tmp_path / "model.onnx")


def test_another_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"The model is in torch\.bfloat16"):
        export_onnx(model_of("bert-mlm").bfloat16(), tmp_path / "model.onnx")


def test_an_exporter_that_gives_up_is_told_in_a_sentence(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise torch.onnx.errors.OnnxExporterError("no such operator\nand much more")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ValueError, match=r"follow BertForMaskedLM \(no such operator\)\. Try the dense model"):
        export_onnx(model_of("bert-mlm"), tmp_path / "model.onnx")


def test_without_onnxruntime(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r'pip install "hf_comera\[onnx\]"'):
        export_onnx(model_of("bert-mlm"), tmp_path / "model.onnx")
