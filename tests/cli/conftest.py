"""What the tests of all commands share: how a command is called, and small checkpoints with a tokenizer."""

import json
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.cli import app
from hf_comera.ops.cuda import build
from tests.architectures import ARCHITECTURES, VOCABULARY


@dataclass
class Answer:
    """What a command left behind."""

    code: int
    out: str
    error: str

    @property
    def said(self) -> str:
        """Standard error as one line, without the frame of a panel."""
        return " ".join(self.error.replace("│", " ").split())

    def json(self):
        assert self.code == 0, self.error
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def call():
    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert "Traceback" not in result.stderr
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A folder with ``dense`` and ``compressed`` BERT and ``gpt2``, each with a tokenizer; to be read only."""
    root = tmp_path_factory.mktemp("checkpoints")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", mask_token="w1")
    made = {
        "dense": ARCHITECTURES["bert-mlm"].new_model(),
        "compressed": get_comera_model(ARCHITECTURES["bert-mlm"].new_model(), ComeraConfig(rank=4)),
        "gpt2": get_comera_model(ARCHITECTURES["gpt2"].new_model(), ComeraConfig(rank=4)),
    }
    for name, model in made.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def bare_machine(tmp_path, monkeypatch):
    """No GPU, no compiler, an empty cache; the folder of all programs."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_COMERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(build, "DEFAULT_CUDA_HOME", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "bin"
