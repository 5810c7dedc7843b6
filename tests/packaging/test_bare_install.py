"""pyproject.toml: the library works where the packages that only scripts and tests use are missing."""

import subprocess
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

PROGRAM = """
import sys

for name in ("datasets", "matplotlib", "pandas", "pytest"):
    sys.modules[name] = None  # importing it now fails, as if it were not installed

import hf_comera
from transformers import AutoModelForMaskedLM, BertConfig

config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=120)
model = hf_comera.get_comera_model(AutoModelForMaskedLM, hf_comera.ComeraConfig(rank=4), config=config)
model.save_pretrained(sys.argv[1])
hf_comera.write_model_card(model, sys.argv[1])
"""


def test_a_model_is_made_and_saved_without_them(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"README.md", "config.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}


def test_packages_of_scripts_are_an_extra():
    base = {Requirement(each).name for each in requires("hf_comera") if "extra ==" not in each}
    extra = {Requirement(each).name for each in requires("hf_comera") if 'extra == "scripts"' in each}
    assert extra == {"datasets", "tokenizers"}
    assert not base & extra
