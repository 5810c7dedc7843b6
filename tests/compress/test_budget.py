"""hf_comera/compress/budget.py: a size is read as it was meant, and bytes are those of the file that is saved."""

import copy

import pytest
import torch

from hf_comera import ComeraConfig, calibrate, get_comera_model
from hf_comera.compress.budget import parse_budget, sized_config
from tests.architectures import ARCHITECTURES, VOCABULARY

READ = [
    ("0.25", "ratio", 0.25),
    (".5", "ratio", 0.5),
    ("5.7M", "parameters", 5_700_000),
    ("5_700_000", "parameters", 5_700_000),
    ("12k", "parameters", 12_000),
    ("1.5g", "parameters", 1_500_000_000),
    ("8MB", "bytes", 8_000_000),
    ("8 mb", "bytes", 8_000_000),
    ("1.5GB", "bytes", 1_500_000_000),
]


@pytest.mark.parametrize(("text", "measure", "value"), READ)
def test_sizes_are_read(text, measure, value):
    found = parse_budget(text)
    assert {name: getattr(found, name) for name in ("ratio", "parameters", "bytes")} == {
        **dict.fromkeys(("ratio", "parameters", "bytes")), measure: value,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "8B", "0", "0MB", "1e3", "-5M", "much", "5MiB", "0.25x"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"is no size\. Give a part of the parameters, for example 0.25"):
        parse_budget(text)


def test_one_is_no_part():
    with pytest.raises(ValueError, match="--budget 1 leaves the model as it is"):
        parse_budget("1")


@pytest.fixture(scope="module", params=["bert-mlm", "gpt2"])
def trained(request):
    torch.manual_seed(0)
    model = ARCHITECTURES[request.param].new_model()
    batches = [{"input_ids": torch.randint(VOCABULARY, (16, 16))} for _ in range(4)]
    return model, calibrate(model, batches)


@pytest.mark.parametrize("storage", [None, "int8", "int4"])
def test_files_have_no_more_bytes_than_wanted_and_hardly_fewer(trained, storage, tmp_path):
    dense, calibration = trained
    whole = get_comera_model(copy.deepcopy(dense), ComeraConfig(target_modules=[], storage=storage or "int8"))
    whole.save_pretrained(tmp_path / "whole", storage=storage or "int8")
    stored = (tmp_path / "whole" / "model.safetensors").stat().st_size
    wanted = int(0.8 * stored) if storage else 2 * stored
    config = sized_config(dense, ComeraConfig(storage=storage), parse_budget(f"{wanted / 1000}kB"), calibration)
    get_comera_model(copy.deepcopy(dense), config, calibration=calibration).save_pretrained(tmp_path / "out")
    found = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert wanted - 8_000 < found <= wanted  # the headers of small files are long
