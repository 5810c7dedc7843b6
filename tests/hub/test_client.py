"""hf_comera/hub/client.py, autoload/: programs that never import hf_comera load compressed models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM, BertConfig

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.hub.client import AUTOLOAD, client_environment, find_client

ROOT = str(Path(__file__).resolve().parents[2])
CONFIG = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=120)

CLIENT = """
import sys
from transformers import AutoModelForMaskedLM
assert "hf_comera" not in sys.modules
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
print(type(model.bert.encoder.layer[0].output.dense).__name__)
"""

HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "hf_comera":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
"""

PARENT = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=4), config=CONFIG).save_pretrained(folder)
    return str(folder)


def start(command, folder, **environment):
    environment = client_environment({**os.environ, **environment})
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize("through", [[], ["parent.py"]], ids=["itself", "a process that it starts"])
def test_a_program_that_knows_nothing_of_hf_comera_loads_a_compressed_model(through, checkpoint, tmp_path):
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "parent.py").write_text(PARENT)
    result = start([sys.executable, *through, "client.py", checkpoint], tmp_path, PYTHONPATH=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "TTLinear"


def test_a_python_without_hf_comera_is_told_what_to_install(checkpoint, tmp_path):
    (tmp_path / "client.py").write_text(HIDE + CLIENT)
    result = start([sys.executable, "client.py", checkpoint], tmp_path)
    assert result.returncode != 0
    assert f"`{sys.executable} -m pip install hf_comera`" in result.stderr


def test_python_starts_without_an_import_of_anything_else(tmp_path):
    heavy = {"torch", "transformers", "hf_comera"}
    program = f"import sys; print(sorted({{name.partition('.')[0] for name in sys.modules}} & {heavy}))"
    result = start([sys.executable, "-c", program], tmp_path)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_the_sitecustomize_that_was_there_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('theirs', __name__)")
    program = "import sitecustomize; print(sitecustomize.__file__)"
    result = start([sys.executable, "-c", program], tmp_path, PYTHONPATH=str(tmp_path))
    assert result.stdout.split() == ["theirs", "sitecustomize", str(tmp_path / "sitecustomize.py")]


def test_our_folder_is_on_the_path_once():
    others = os.pathsep.join(["a", "b"])
    twice = client_environment(client_environment({"PYTHONPATH": others, "HOME": "h"}))
    assert twice == {"PYTHONPATH": os.pathsep.join([str(AUTOLOAD), "a", "b"]), "HOME": "h"}
    assert client_environment({})["PYTHONPATH"] == str(AUTOLOAD)


def test_clients_are_found_beside_python_on_the_path_and_as_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_client("python")[0].startswith(str(Path(sys.executable).parent))
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_client("tool") == [str(tmp_path / "tool")]
    (tmp_path / "train.py").write_text("")
    assert find_client("train.py") == [sys.executable, "train.py"]
    with pytest.raises(ValueError, match=r"'nothing' is no program beside .* hf-comera run lm_eval"):
        find_client("nothing")
