"""Compressed models in other runtimes: programs of torch.export and ONNX files compute what the model does."""

import subprocess
import sys

import onnxruntime
import pytest
import torch
from torch.export import Dim

from hf_comera import ComeraConfig, get_comera_model
from tests.architectures import ARCHITECTURES, VOCABULARY

SIZES = {"input_ids": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "attention_mask": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}


def model_of(name):
    """A model of one block; a cache is no output of its programs."""
    architecture = ARCHITECTURES[name]
    config = architecture.new_config()
    config.num_hidden_layers, config.use_cache = 1, False
    return get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=config).eval()


def inputs_of(batch, length):
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": torch.randint(2, VOCABULARY, (batch, length)), "attention_mask": mask}


def assert_close(found, model, inputs):
    with torch.no_grad():
        torch.testing.assert_close(found, model(**inputs)[0], rtol=1e-4, atol=1e-5)


LOADED_ELSEWHERE = """
import sys, torch
inputs = torch.load(sys.argv[1] + "/inputs.pt", weights_only=True)
program = torch.export.load(sys.argv[1] + "/model.pt2")
assert not any(name.startswith("hf_comera") for name in sys.modules)
torch.save(program.module()(**inputs)[0], sys.argv[1] + "/logits.pt")
"""


def test_an_exported_program_runs_in_a_process_without_hf_comera(tmp_path):
    model, inputs = model_of("bert-mlm"), inputs_of(3, 14)
    model.config.return_dict = False  # a class for outputs would have to be imported there
    program = torch.export.export(model, (), inputs_of(2, 9), dynamic_shapes=SIZES)
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save(inputs, tmp_path / "inputs.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOADED_ELSEWHERE, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert_close(torch.load(tmp_path / "logits.pt"), model, inputs)


@pytest.mark.parametrize(
    "name",
    [
        "bert-mlm",
        "gpt2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-tied", "bert-classifier", "distilbert")),
    ],
)
def test_an_onnx_file_takes_batches_of_any_size(name, tmp_path):
    model, path = model_of(name), tmp_path / "model.onnx"
    torch.onnx.export(model, (), path, kwargs=inputs_of(2, 9), dynamic_shapes=SIZES, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    for size in ((2, 9), (1, 1), (5, 17)):
        inputs = inputs_of(*size)
        (logits,) = session.run(None, {key: tensor.numpy() for key, tensor in inputs.items()})
        assert_close(torch.from_numpy(logits), model, inputs)
