"""benchmarks/architectures/sweep.py: architectures against their dense ones, rows that stay, limits, and the page."""

import csv

import pytest
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from benchmarks.architectures import sweep as architecture_sweep
from benchmarks.architectures.checks import CHECKS, _reason, sweep_architecture
from benchmarks.architectures.classes import model_types
from benchmarks.architectures.configs import shrunken_config
from benchmarks.architectures.exceptions import EXCEPTIONS, INPUT_SIZES, NEEDED, NEEDED_INPUTS
from benchmarks.architectures.page import PAGE, verdict_of
from benchmarks.harness.process import Stopped
from benchmarks.harness.timing import RESULTS

FINISHED = {"scratch": "passed", "backward": "passed", "class": "BertForMaskedLM", "kind": "masked language"}
EMPTY_PAGE = "above\n<!-- architectures: begin -->\n<!-- architectures: end -->\nbelow\n"


def columns_of(model_type):
    columns = {}
    sweep_architecture(columns.update, model_type)
    return columns


@pytest.mark.parametrize(
    ("model_type", "class_name", "not_applicable"),
    [
        ("bert", "BertForMaskedLM", {"generation"}),
        ("gpt2", "GPT2LMHeadModel", set()),
        ("t5", "T5ForConditionalGeneration", set()),
        ("vit", "ViTForImageClassification", {"generation"}),
        ("mixtral", "MixtralForCausalLM", set()),
    ],
)
def test_an_architecture_passes_every_check(model_type, class_name, not_applicable):
    columns = columns_of(model_type)
    assert columns["class"] == class_name
    outcomes = {name: columns[name].partition(":")[0] for name in CHECKS}
    expected = {name: "does not apply" if name in not_applicable else "passed" for name in CHECKS}
    assert outcomes == expected, columns
    assert verdict_of(columns) == "works"


def test_experts_are_named_as_what_stays_dense():
    """The size of the layers of Mixtral 8x7B, by hand: experts, attention, embedding and head."""
    columns = columns_of("mixtral")
    experts, attention, words = 8 * 3 * 4096 * 14336, 2 * 4096 * (4096 + 1024), 32000 * 4096
    assert columns["parameters"] == pytest.approx(4 * (experts + attention) + 2 * words, rel=1e-4)
    assert columns["dense_part"] == "model.layers.*.mlp.experts.gate_up_proj"
    assert columns["dense_reason"] == "3-D parameter of MixtralExperts"
    assert columns["dense_share"] == pytest.approx(4 * experts * 2 / 3 / columns["parameters"], abs=1e-4)
    assert columns["stays_dense"] > 0.9


class Scaled(nn.Embedding):
    pass


@pytest.mark.parametrize(
    ("layer", "pattern", "reason"),
    [
        (nn.Linear(2, 2), "0.weight", "Linear, no default target"),
        (nn.Linear(2, 2), "0.bias", "bias of Linear"),
        (Scaled(2, 2), "0.weight", "Scaled, a subclass of Embedding"),
        (nn.Conv1d(2, 2, 1), "0.weight", "convolution (Conv1d)"),
        (nn.LayerNorm(2), "0.weight", "1-D parameter of LayerNorm"),
    ],
    ids=str,
)
def test_why_a_part_stays_dense(layer, pattern, reason):
    assert _reason(nn.ModuleList([layer]), pattern.replace("0", "*")) == reason


def test_a_model_without_layers_to_compress_is_no_failure():
    columns = columns_of("mobilenet_v2")
    assert columns["scratch"] == verdict_of(columns) == "nothing to compress"
    assert columns["stays_dense"] == 1


def test_an_architecture_that_needs_a_missing_package_is_not_compared():
    columns = columns_of("higgs_audio_v2_tokenizer")
    assert "requires the torchaudio library" in columns["dense"]
    assert verdict_of(columns) == "dense does not run"


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 256}),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 4}),
        ("gemma3_text", {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
        ("swin", {"embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("vit", {"image_size": 32, "patch_size": 8}),
    ],
)
def test_small_configs_keep_the_kinds_of_layers(model_type, settings):
    config = shrunken_config(model_type)
    found = {name: getattr(config, name) for name in settings}
    assert {name: list(v) if isinstance(v, list | tuple) else v for name, v in found.items()} == {
        name: list(v) if isinstance(v, list | tuple) else v for name, v in settings.items()
    }


def unknown_settings(config, settings, path):
    """Paths of settings that are in no place of ``config``, which would take them without a word."""
    for name, value in settings.items():
        if not hasattr(config, name):
            yield f"{path}.{name}"
        elif isinstance(getattr(config, name), PreTrainedConfig):
            yield from unknown_settings(getattr(config, name), value, f"{path}.{name}")


def test_exceptions_are_settings_of_known_architectures():
    tables = (EXCEPTIONS, NEEDED)
    assert {*EXCEPTIONS, *NEEDED, *INPUT_SIZES, *NEEDED_INPUTS} <= set(model_types())
    unknown = [
        path
        for table in tables
        for model_type, settings in table.items()
        for path in unknown_settings(CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {})), settings, model_type)
    ]
    assert not unknown


def test_tokens_of_composite_models_lie_within_the_small_vocabulary():
    config = shrunken_config("qwen2_5_vl")
    special = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    assert len(set(special)) == 4
    assert max(special) < config.text_config.vocab_size


@pytest.mark.parametrize(
    ("columns", "verdict"),
    [
        ({"dense": "passed", "scratch": "passed"}, "works"),
        ({"dense": "failed: ImportError"}, "dense does not run"),
        ({"dense": "passed", "scratch": "passed", "merge": "failed: output 0 differs by 0.1"}, "failed"),
        ({"dense": "passed", "scratch": "nothing to compress"}, "nothing to compress"),
        ({"dense": "passed", "generation": "does not apply: it does not generate"}, "works"),
        ({"dense": "passed", "scratch": "passed", "stopped": "stopped after 1 seconds"}, "stopped"),
        ({"stopped": "the process ended with status -11"}, "stopped"),
    ],
)
def test_verdict(columns, verdict):
    assert verdict_of(columns) == verdict


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs the script in a folder; what the processes would send is made up, and which were asked is kept."""
    page = tmp_path / "page.md"
    page.write_text(EMPTY_PAGE, encoding="utf-8")
    asked = []

    def answer(work, values, **_):
        asked.extend(values)
        if values == ["gpt2"]:
            raise Stopped("stopped after 2 seconds", [{"dense": "passed"}])
        return [FINISHED | {"dense": "passed"}]

    def run(*options):
        asked.clear()
        paths = ["--results", str(tmp_path / "rows.csv"), "--page", str(page)]
        status = architecture_sweep.main([*options, *paths])
        with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
            rows = {row["model_type"]: row for row in csv.DictReader(file)}
        return list(asked), rows, page.read_text(encoding="utf-8"), status

    monkeypatch.setattr(architecture_sweep, "call_limited", answer)
    return run


def test_it_goes_on_where_it_was_stopped(sweep):
    assert sweep("bert", "t5")[0] == ["bert", "t5"]
    asked, rows, _, _ = sweep("bert", "t5", "vit")
    assert asked == ["vit"]
    assert list(rows) == ["bert", "t5", "vit"]
    assert sweep("bert", "vit", "--again")[0] == ["bert", "vit"]


def test_what_did_not_work_is_tried_again_if_asked_for(sweep):
    sweep("bert", "gpt2")
    assert sweep("bert", "gpt2")[0] == []
    assert sweep("bert", "gpt2", "--retry")[0] == ["gpt2"]


def test_rows_of_other_versions_are_no_answer(sweep, monkeypatch):
    sweep("bert")
    monkeypatch.setattr(architecture_sweep, "versions", lambda: {"torch": "9.9", "transformers": "8.8"})
    assert sweep("bert")[0] == ["bert"]


def test_what_was_found_before_the_limit_stays(sweep):
    _, rows, page, status = sweep("gpt2", "bert")
    assert rows["gpt2"]["verdict"] == "stopped"
    assert rows["gpt2"]["dense"] == "passed"
    assert rows["gpt2"]["stopped"] == "stopped after 2 seconds"
    assert "| `gpt2` |  | stopped after 2 seconds |" in page
    assert "| `bert` | BertForMaskedLM | works |" in page
    assert page.startswith("above\n<!--")
    assert page.endswith("-->\nbelow\n")
    assert status == 0


def test_the_page_is_checked_against_the_rows(sweep, tmp_path, capsys):
    sweep("bert")
    assert sweep("--check")[3] == 0
    (tmp_path / "page.md").write_text(EMPTY_PAGE, encoding="utf-8")
    assert sweep("--check")[3] == 1
    assert "--page-only" in capsys.readouterr().out
    assert sweep("--page-only")[0] == []
    assert sweep("--check")[3] == 0


def test_a_page_without_its_comments_is_refused(sweep, tmp_path):
    (tmp_path / "page.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="<!-- architectures: begin -->"):
        sweep("bert")


def test_unknown_model_types_are_named(capsys):
    with pytest.raises(SystemExit):
        architecture_sweep.main(["mixtrall"])
    assert "'mixtrall' is no model type" in capsys.readouterr().err


def test_the_page_has_the_rows_of_the_csv_file():
    assert architecture_sweep.check_page(PAGE, RESULTS / "sweep_architectures.csv") == 0


def test_every_row_is_of_an_architecture_of_transformers():
    rows = architecture_sweep.read_rows(RESULTS / "sweep_architectures.csv")
    assert {row["model_type"] for row in rows} <= set(model_types())
