"""scripts/compress_pretrained.py: a trained model becomes smaller, heals, resumes bit for bit, keeps its budget."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

import compress_pretrained
from compress.healing import MinutesUsed
from hf_comera import is_comera_model
from loop.interrupt import Interrupt

WORDS = ("cat", "dog", "bird", "fish", "horse", "cow", "mouse", "sheep", "sees", "likes", "and", "the")
SPECIAL = ("[PAD]", "[UNK]", "[MASK]")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def sentences(count):
    return [f"the {WORDS[n % 8]} {WORDS[8 + n // 8 % 2]} the {WORDS[n // 16 % 8]} and {n}" for n in range(count)]


def save_model(folder, kind="BertModel", **settings):
    """A model with random weights that are large enough to tell sentences apart, and its tokenizer."""
    torch.manual_seed(0)
    numbers = [str(number) for number in range(400)]
    words = {word: index for index, word in enumerate((*SPECIAL, *WORDS, *numbers))}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=32, initializer_range=0.2, **SIZES, **settings)
    getattr(transformers, kind)(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", model_max_length=32
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture
def arguments(model_folder, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join([*sentences(300), "", *sentences(40)]), encoding="utf-8")
    return [
        "--model", str(model_folder), "--texts", str(texts), "--output_dir", str(tmp_path / "out"),
        "--budget", "0.5", "--max_steps", "8", "--eval_steps", "3", "--held_out_percentage", "20", "--use_cpu",
        "--num_threads", "1", "--per_device_train_batch_size", "16", "--speed_rounds", "0", "--logging_steps", "1",
    ]  # fmt: skip


def changed(arguments, **values):
    result = list(arguments)
    for name, value in values.items():
        result[result.index(f"--{name}") + 1] = str(value)
    return result


def without(arguments, name):
    place = arguments.index(f"--{name}")
    return [*arguments[:place], *arguments[place + 2 :]]


def results(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def interrupt_after(monkeypatch, steps):
    asked = []
    monkeypatch.setattr(Interrupt, "agreed", lambda self: len(asked) >= steps or asked.append(0))


def test_a_model_becomes_smaller_heals_and_loads(arguments, model_folder, tmp_path, capsys):
    longer = [*changed(arguments, max_steps=60, eval_steps=30, speed_rounds=1), "--learning_rate", "5e-3"]
    assert compress_pretrained.main(longer) == 0
    out, printed = tmp_path / "out", capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", "model.safetensors", "quality.png", "results.json", "run_settings.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    dense, stored, decomposed, healed = results(out)["candidates"]
    assert [one["name"] for one in (dense, stored, decomposed, healed)] == [
        "dense",
        "dense, int8",
        "decomposed",
        "healed",
    ]
    assert dense["losses"]["loss"] == 0 < stored["losses"]["loss"] < healed["losses"]["loss"]
    assert healed["losses"]["loss"] < 0.8 * decomposed["losses"]["loss"]
    assert decomposed["cosine"] < healed["cosine"] < 1
    assert healed["parameters"] <= 0.5 * dense["parameters"] < 1.1 * healed["parameters"]
    assert set(dense["answers"]) == set(healed["answers"]) == {"1", "32"}
    assert not decomposed["answers"]
    assert [step for step, _ in results(out)["held_out_losses"]] == [0, 30, 60]
    assert "Load it with:\n  import hf_comera\n  from transformers import BertModel" in printed
    assert f"{healed['cosine']:.4f}" in printed
    assert is_comera_model(AutoModel.from_pretrained(out))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "compress_pretrained.py" in card
    assert "loss against the dense model" in card

    assert compress_pretrained.main(longer) == 0
    assert "This run is complete" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [4, 6])
def test_a_stopped_run_ends_with_the_same_weights(steps, arguments, tmp_path, monkeypatch, capsys):
    assert compress_pretrained.main(changed(arguments, output_dir=tmp_path / "whole")) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, steps)
        assert compress_pretrained.main(arguments) == 130
    told = capsys.readouterr().out
    assert re.search(
        r"Interrupted after step \d of 8; everything is saved. Go on with:\n  python scripts/compress_p", told
    )
    assert compress_pretrained.main(arguments) == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert results(tmp_path / "whole")["held_out_losses"] == results(tmp_path / "out")["held_out_losses"]


def test_a_killed_run_goes_on_from_its_last_checkpoint(arguments, tmp_path, monkeypatch, capsys):
    assert compress_pretrained.main(changed(arguments, output_dir=tmp_path / "whole")) == 0
    with monkeypatch.context() as patch:

        def kill(self, args, state, *_, **__):
            if state.global_step > 3:
                raise SystemExit(137)

        patch.setattr(MinutesUsed, "on_evaluate", kill)
        with pytest.raises(SystemExit):
            compress_pretrained.main(arguments)
    assert compress_pretrained.main(arguments) == 0
    assert "going on from" in capsys.readouterr().out
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_minutes_end_a_run_and_those_before_a_stop_count(arguments, tmp_path, monkeypatch):
    arguments = [*without(arguments, "max_steps"), "--minutes", "0.05"]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 15)  # the first ten tell the time of a step
        assert compress_pretrained.main(arguments) == 130
    (checkpoint,) = sorted((tmp_path / "out").glob("checkpoint-*"))[-1:]
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    before = state["stateful_callbacks"]["MinutesUsed"]["attributes"]["seconds"]
    assert 0 < before < 3
    assert compress_pretrained.main(arguments) == 0
    found = results(tmp_path / "out")
    assert before / 60 < found["minutes"] < 0.2
    assert 0 < found["steps"] <= state["max_steps"]


def test_time_is_counted_between_steps_and_over_a_resumption(monkeypatch):
    clock = iter([10.0, 15.0, 20.0, 95.0])
    monkeypatch.setattr("compress.healing.time.perf_counter", lambda: next(clock))
    used, state = MinutesUsed(1.5), transformers.TrainerState()
    state.stateful_callbacks = {"MinutesUsed": {"attributes": {"seconds": 7.0}}}
    control = transformers.TrainerControl()
    used.on_train_begin(None, state, control)
    used.on_step_end(None, state, control)
    assert used.state()["attributes"] == {"seconds": 17.0}
    assert not control.should_training_stop
    used.on_step_end(None, state, control)
    assert control.should_training_stop
    assert used.seconds == 92.0


BUDGETS = [  # the budget, its storage, and what the checkpoint may have
    pytest.param("35kB", "int8", ("num_bytes", 35_000, 4_000), id="bytes-int8"),
    pytest.param("24kB", "int4", ("num_bytes", 24_000, 4_000), id="bytes-int4"),
    pytest.param("100kB", "none", ("num_bytes", 100_000, 6_000), id="bytes-as-they-are"),
    pytest.param("20k", "int8", ("parameters", 20_000, 200), id="parameters"),
]


@pytest.mark.parametrize(("budget", "storage", "limit"), BUDGETS)
def test_budgets_are_kept_by_what_is_saved(budget, storage, limit, arguments, tmp_path):
    options = ["--storage", storage, "--minutes", "0"]
    assert compress_pretrained.main([*without(changed(arguments, budget=budget), "max_steps"), *options]) == 0
    last = results(tmp_path / "out")["candidates"][-1]
    assert last["name"] == "decomposed"
    name, most, slack = limit
    assert most - slack < last[name] <= most
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == last["num_bytes"]


KINDS = [
    pytest.param("BertForMaskedLM", {}, "token_loss", id="masked"),
    pytest.param("BertLMHeadModel", {"is_decoder": True}, "token_loss", id="causal"),
    pytest.param("BertForSequenceClassification", {"num_labels": 3}, "class_loss", id="classifier"),
]


@pytest.mark.parametrize(("kind", "settings", "loss"), KINDS)
def test_models_of_each_kind(kind, settings, loss, arguments, tmp_path):
    folder = save_model(tmp_path / "model", kind, **settings)
    arguments = changed(arguments, model=folder, max_steps=4)
    assert compress_pretrained.main(arguments) == 0
    last = results(tmp_path / "out")["candidates"][-1]
    assert loss in last["losses"]
    assert last["cosine"] is None


def test_tokens_are_hidden_from_masked_models_and_resume_exactly(arguments, tmp_path, monkeypatch):
    arguments = changed(arguments, model=save_model(tmp_path / "model", "BertForMaskedLM"))
    assert compress_pretrained.main(changed(arguments, output_dir=tmp_path / "whole")) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert compress_pretrained.main(arguments) == 130
    assert compress_pretrained.main(arguments) == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_another_run_in_the_same_folder_is_refused_by_name(arguments, tmp_path):
    assert compress_pretrained.main(arguments) == 0
    with pytest.raises(ValueError, match=r"was written by a run with other settings: budget was"):
        compress_pretrained.main(changed(arguments, budget="0.4"))
    other = tmp_path / "other.txt"
    other.write_text("\n".join(sentences(200)), encoding="utf-8")
    with pytest.raises(ValueError, match="texts was"):
        compress_pretrained.main(changed(arguments, texts=other))
    assert compress_pretrained.main([*changed(arguments, budget="0.4", max_steps=1), "--overwrite_output_dir"]) == 0


REFUSED = [
    ({"budget": "5.7X"}, "--budget 5.7X is no size. Give a part"),
    ({"budget": "1.5"}, "leaves the model as it is"),
    ({"budget": "1e3"}, "--budget 1e3 is no size"),
    ({"budget": "0.01"}, "target_ratio=0.01 asks for"),
    ({"budget": "3M"}, "asks for 3,000,000 parameters, and the model has"),
    ({"budget": "2kB"}, "asks for 2,000 bytes, but .* are the fewest"),
    ({"budget": "1GB"}, "is met by the dense model"),
    ({"max_steps": "0"}, "--max_steps 0 must be greater than 0"),
    ({"held_out_percentage": "100"}, "--held_out_percentage 100 must lie between 0 and 100"),
    ({"texts": "nowhere.txt"}, "--texts nowhere.txt is not a file here"),
    ({"model": "nowhere"}, "nowhere"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=str)
def test_what_cannot_work_is_refused_by_name(change, message, arguments):
    with pytest.raises(ValueError, match=message):
        compress_pretrained.main(changed(arguments, **change))


def test_abbreviated_options_are_refused(arguments):
    with pytest.raises(ValueError, match="Did you mean --storage"):
        compress_pretrained.main([*arguments, "--stor", "int4"])


def test_a_model_without_a_tokenizer_is_refused(arguments, tmp_path, model_folder):
    AutoModel.from_pretrained(model_folder).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="tokenizer"):
        compress_pretrained.main(changed(arguments, model=tmp_path / "bare"))


def test_a_compressed_model_is_refused(arguments, tmp_path):
    assert compress_pretrained.main(changed(arguments, max_steps=1)) == 0
    with pytest.raises(ValueError, match=r"is compressed already\. Give the dense model"):
        compress_pretrained.main(changed(arguments, model=tmp_path / "out", output_dir=tmp_path / "again"))
