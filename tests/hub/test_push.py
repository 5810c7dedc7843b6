"""hub/push.py: what is pushed, by us or by Transformers, loads by repository id, and only with hf_comera."""

import json
import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from hf_comera import ComeraConfig, get_comera_model, push_folder, push_to_hub
from tests.hub.fake_hub import FakeHub

BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 120,
}
REPOSITORIES = ["me/by-hf-comera", "me/by-transformers"]

PUSH = """
import json
import sys
import torch
from huggingface_hub import HfApi, ModelCard
from tokenizers import Tokenizer, models
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedTokenizerFast
import hf_comera

config = BertConfig(**json.loads(sys.argv[2]))
settings = hf_comera.ComeraConfig(rank=8, storage="int8")
hf_comera.get_comera_model(AutoModelForMaskedLM, settings, config=config).save_pretrained(sys.argv[1] + "-model")
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1] + "-model")  # what int8 rounds off is gone
words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(120)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", mask_token="w1")
torch.save(model(torch.arange(16).reshape(2, 8)).logits, sys.argv[1])

commit = hf_comera.push_to_hub(model, "by-hf-comera", tokenizer=tokenizer, private=True, license="mit")
assert commit.commit_url.endswith(commit.oid), commit
model.push_to_hub("me/by-transformers")

# The owner writes a line of text, then a new version goes to a branch.
card = ModelCard.load("me/by-hf-comera").content + "Written by hand."
HfApi().upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id="me/by-hf-comera")
hf_comera.push_to_hub(model, "me/by-hf-comera", license="apache-2.0", revision="next")
"""

PUSH_FOLDERS = """
import json
import sys
from pathlib import Path
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForMaskedLM, BertConfig
import hf_comera

config = BertConfig(**json.loads(sys.argv[2]))
model = hf_comera.get_comera_model(AutoModelForMaskedLM, hf_comera.ComeraConfig(rank=4), config=config)
with_card, without = Path(sys.argv[1], "with-card"), Path(sys.argv[1], "without")
for folder in (with_card, without):
    model.save_pretrained(folder)
    (folder / "optimizer.pt").write_text("not part of the model")
metric = {"name": "held-out loss", "value": 3.25, "measured_on": "5 % of the functions"}
hf_comera.write_model_card(model, with_card, metrics=[metric], license="mit")
before = {path: path.read_bytes() for folder in (with_card, without) for path in folder.iterdir()}

hf_comera.push_folder(with_card, "with-card", private=True)
card = ModelCard.load("me/with-card").content + "Written by hand."
HfApi().upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id="me/with-card")
hf_comera.push_folder(with_card, "me/with-card", revision="next")
hf_comera.push_folder(without, "me/without", commit_message="First")
assert before == {path: path.read_bytes() for folder in (with_card, without) for path in folder.iterdir()}
"""

LOAD = """
import sys
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
import hf_comera

expected = torch.load(sys.argv[1], weights_only=True)
for repository in sys.argv[2:]:
    model, report = AutoModelForMaskedLM.from_pretrained(repository, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert torch.equal(model.eval()(torch.arange(16).reshape(2, 8)).logits, expected), repository
assert AutoTokenizer.from_pretrained(sys.argv[2]).mask_token == "w1"
"""

LOAD_WITHOUT_HF_COMERA = """
import sys
from transformers import AutoModelForMaskedLM

for repository in sys.argv[1:]:
    try:
        AutoModelForMaskedLM.from_pretrained(repository)
    except Exception as error:
        print(repr(error))
assert "hf_comera" not in sys.modules
"""


def run_program(program: str, *arguments: str, environment: dict[str, str]) -> str:
    """Standard output of a Python process that must succeed."""
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def hub():
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def environment(hub, tmp_path):
    """Environment of a process that takes the server for the Hub and has nothing in its cache."""
    return os.environ | hub.environment(cache=str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def logits(hub, tmp_path_factory):
    """One model is pushed both ways; the path of its logits."""
    folder = tmp_path_factory.mktemp("pushed")
    environment = os.environ | hub.environment(cache=str(folder / "cache"))
    run_program(PUSH, str(folder / "logits.pt"), json.dumps(BERT), environment=environment)
    return folder / "logits.pt"


def test_loads_by_repository_id_bit_for_bit(logits, environment):
    run_program(LOAD, str(logits), *REPOSITORIES, environment=environment)


def test_a_process_without_hf_comera_is_refused(logits, environment):
    output = run_program(LOAD_WITHOUT_HF_COMERA, *REPOSITORIES, environment=environment)
    assert output.count("RuntimeError") == output.count("ignore_mismatched_sizes") == len(REPOSITORIES), output


def test_the_repository_holds_what_was_pushed(logits, hub):
    repository = hub.repositories["me/by-hf-comera"]
    assert repository.private
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(repository.files())
    for name in REPOSITORIES:
        stored = load(hub.repositories[name].files()["model.safetensors"])
        assert torch.int8 in {tensor.dtype for tensor in stored.values()}
    card = ModelCard(repository.files()["README.md"].decode())
    assert (card.data.license, card.data.library_name) == ("mit", "transformers")
    assert 'AutoTokenizer.from_pretrained("me/by-hf-comera")' in card.text


def test_a_new_branch_keeps_the_text_of_the_owner(logits, hub):
    repository = hub.repositories["me/by-hf-comera"]
    card = ModelCard(repository.files("next")["README.md"].decode())
    assert card.data.license == "apache-2.0"
    assert card.text.endswith("Written by hand.")
    assert ModelCard(repository.files()["README.md"].decode()).data.license == "mit"


def test_an_uncompressed_model_is_refused_before_the_hub_is_asked():
    model = BertForMaskedLM(BertConfig(**BERT))
    with pytest.raises(ValueError, match="no tensor-train layers"):
        push_to_hub(model, "me/dense")


def test_an_unreachable_hub_is_an_error_and_not_an_empty_card():
    """The tests run offline: to take that for a repository without a card would lose the card's text."""
    model = get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=4), config=BertConfig(**BERT))
    with pytest.raises(LocalEntryNotFoundError):
        push_to_hub(model, "me/by-hf-comera")


@pytest.fixture(scope="module")
def pushed_folders(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    environment = os.environ | hub.environment(cache=str(folder / "cache"))
    run_program(PUSH_FOLDERS, str(folder), json.dumps(BERT), environment=environment)
    return hub.repositories


def test_a_folder_is_pushed_with_its_card_and_nothing_else(pushed_folders):
    repository = pushed_folders["me/with-card"]
    assert repository.private
    assert set(repository.files()) == {"README.md", "config.json", "model.safetensors"}
    card = ModelCard(repository.files("next")["README.md"].decode())
    assert "3.25" in card.text
    assert card.data.license == "mit"
    assert 'AutoModelForMaskedLM.from_pretrained("me/with-card")\n' in card.text
    assert card.text.endswith("Written by hand.")


def test_a_folder_without_a_card_gets_one_of_measured_sizes(pushed_folders):
    card = ModelCard(pushed_folders["me/without"].files()["README.md"].decode())
    assert 'AutoModelForMaskedLM.from_pretrained("me/without")' in card.text
    assert "| `bert.encoder.layer.0.attention.self.query` | linear layer |" in card.text


@pytest.mark.parametrize("compressed", [False, True], ids=["dense", "config of another"])
def test_a_folder_that_is_no_model_of_ours_is_refused_before_the_hub_is_asked(compressed, tmp_path):
    model = BertForMaskedLM(BertConfig(**BERT))
    model.save_pretrained(tmp_path)
    if compressed:
        get_comera_model(model, ComeraConfig(rank=4)).save_pretrained(tmp_path / "other")
        (tmp_path / "other" / "config.json").replace(tmp_path / "config.json")
    with pytest.raises(ValueError, match="holds no tensor-train cores" if compressed else "is dense"):
        push_folder(tmp_path, "me/dense")
