"""hf_comera/hub/cards.py: a card says what was measured or given, nothing else, and keeps what its owner wrote."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from hf_comera import ComeraConfig, get_comera_model, is_comera_model, push_to_hub, size_report, write_model_card
from hf_comera.hub.cards import TASKS
from hf_comera.hub.source import find_model
from tests.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 120,
}
GIVEN = {
    "base_model": "someone/tiny-bert",
    "training_data": "Functions of the standard library.",
    "metrics": [
        {"name": "held-out loss", "value": 3.21987, "measured_on": "5% of the functions | by hash"},
        {"name": "functions", "value": 1234, "measured_on": "all"},
    ],
    "license": "apache-2.0",
    "language": ["en", "code"],
    "repo_id": "me/tiny-comera",
    "training_command": "python train.py --steps 10",
}
SECTIONS = {  # argument -> what it alone puts on the card
    "base_model": "Base model",
    "training_data": "## Training data",
    "metrics": "## Measured",
    "license": "## Licence",
    "training_command": "python train.py --steps 10",
}


@pytest.fixture
def model():
    return get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=4), config=BertConfig(**BERT))


def table_rows(text: str) -> dict[str, list[str]]:
    """First cell -> other cells, of every table row on a card."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in rows}


def python_snippets(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_sizes_are_those_of_the_model(model, tmp_path):
    rows = table_rows(write_model_card(model, tmp_path).read_text())
    report = size_report(model)
    expected = {
        "parameters": (report.dense_parameters, report.parameters),
        "bytes": (report.dense_bytes, report.bytes),
        "parameters of the compressed layers": (report.compressed_dense_parameters, report.compressed_parameters),
    }
    for what, (dense, ours) in expected.items():
        assert rows[what] == [f"{dense:,}", f"{ours:,}", f"{dense / ours:.1f}"]


def test_every_compressed_layer_has_its_factors_and_ranks(model, tmp_path):
    text = write_model_card(model, tmp_path).read_text()
    rows = table_rows(text)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "ranks")}
    assert len(layers) == 13, "two encoders of six linear layers, and the word embedding"
    assert "12 linear layers and 1 embedding" in text
    for name, layer in layers.items():
        kind = "embedding" if "embeddings" in name else "linear layer"
        lists = [", ".join(map(str, numbers)) for numbers in (layer.in_factors, layer.out_factors, layer.ranks)]
        assert rows[name] == [kind, *lists]


def test_the_way_back_to_dense_is_told(model, tmp_path):
    assert "merge_and_unload" in write_model_card(model, tmp_path).read_text()


def test_what_is_not_given_is_left_out(model, tmp_path):
    path = write_model_card(model, tmp_path)
    text = path.read_text()
    assert "None" not in text
    for section in SECTIONS.values():
        assert section not in text
    metadata = ModelCard.load(path).data.to_dict()
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["comera", "tensor-train"],
    }


@pytest.mark.parametrize("argument", SECTIONS)
def test_each_argument_brings_its_section_alone(model, tmp_path, argument):
    text = write_model_card(model, tmp_path, **{argument: GIVEN[argument]}).read_text()
    assert [name for name, section in SECTIONS.items() if section in text] == [argument]


def test_given_values_reach_text_and_metadata(model, tmp_path):
    path = write_model_card(model, tmp_path, **GIVEN)
    text, data = path.read_text(), ModelCard.load(path).data
    assert table_rows(text)["held-out loss"] == ["3.22", r"5% of the functions \| by hash"]
    assert table_rows(text)["functions"] == ["1234", "all"]
    assert "# tiny-comera\n" in text
    assert 'from_pretrained("me/tiny-comera")' in text
    assert (data.base_model, data.license, data.language) == ("someone/tiny-bert", "apache-2.0", ["en", "code"])


def test_a_base_model_on_disk_is_told_but_is_no_metadata(model, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    path = write_model_card(model, tmp_path, base_model=str(base))
    assert f"Base model: {base}" in path.read_text()
    assert ModelCard.load(path).data.base_model is None


def test_python_on_the_card_runs_as_printed(model, tmp_path, monkeypatch):
    """In the folder of the card: load, compare, merge back, load the merged model."""
    model.save_pretrained(tmp_path)
    load, merge = python_snippets(write_model_card(model, tmp_path).read_text())
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    exec(load, session)
    ids = torch.arange(8).reshape(1, 8)
    expected = model.eval()(ids).logits
    assert torch.equal(session["model"].eval()(ids).logits, expected)
    exec(merge, session)
    dense = BertForMaskedLM.from_pretrained("dense-model")
    torch.testing.assert_close(dense.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_own_text_and_metadata_survive_a_refresh(model, tmp_path):
    path = write_model_card(model, tmp_path, license="mit")
    text = path.read_text().replace("\n# ", "\n# My model: ").replace("tags:\n", "tags:\n- mine\n")
    path.write_text(text.replace("---\n\n", "thumbnail: cat.png\n---\n\n", 1) + "\nWritten by hand.\n")
    write_model_card(model, tmp_path, **GIVEN)
    refreshed = path.read_text()
    data = ModelCard.load(path).data
    assert f"\n# My model: {tmp_path.name}\n" in refreshed
    assert refreshed.endswith("\nWritten by hand.\n")
    assert "## Measured" in refreshed
    assert (data.thumbnail, data.license, data.tags) == ("cat.png", "apache-2.0", ["mine", "comera", "tensor-train"])
    write_model_card(model, tmp_path, **GIVEN)
    assert path.read_text() == refreshed


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["unix", "windows"])
def test_a_card_without_our_part_gets_it_at_the_end(model, tmp_path, newline):
    own = ["---", "license: mit", "pipeline_tag: feature-extraction", "---", "# Mine", "", "My words.", ""]
    path = tmp_path / "README.md"
    path.write_bytes(newline.join(own).encode())
    write_model_card(model, tmp_path)
    text = path.read_bytes().decode()
    assert f"# Mine{newline}{newline}My words.{newline}" in text
    assert text.index("My words.") < text.index("<!-- hf_comera:begin")
    assert text.count("\n") == text.count(newline)
    assert ModelCard.load(path).data.pipeline_tag == "feature-extraction"


BROKEN_CARDS = [  # text of the card, what the message names
    pytest.param("---\nlicense: mit\n---\n<!-- hf_comera:begin -->\n", "only half", id="no-end"),
    pytest.param("---\nlicense: mit\n---\n<!-- hf_comera:end -->\n", "only half", id="no-begin"),
    pytest.param(
        "---\nlicense: mit\n---\n" + "<!-- hf_comera:begin --><!-- hf_comera:end -->" * 2, "once", id="twice"
    ),
    pytest.param("---\nlicense: [mit\n---\n# Mine\n", "metadata that cannot be read", id="yaml"),
    pytest.param("---\n- mit\n---\n# Mine\n", "metadata that cannot be read", id="no-mapping"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_CARDS)
def test_a_broken_card_raises_and_stays_as_it_was(model, tmp_path, text, message):
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        write_model_card(model, tmp_path)
    assert path.read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["README.md"]


def test_an_uncompressed_model_raises_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"BertForMaskedLM has no tensor-train layers.*get_comera_model"):
        write_model_card(BertForMaskedLM(BertConfig(**BERT)), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metric", [{"name": "loss", "value": 1.0}, {"name": "loss", "value": 1.0, "on": "all"}])
def test_a_metric_without_its_data_raises(model, tmp_path, metric):
    with pytest.raises(ValueError, match="measured_on"):
        write_model_card(model, tmp_path, metrics=[metric])


@pytest.mark.parametrize(("suffix", "task"), TASKS.items())
def test_auto_classes_of_the_table_exist(suffix, task):
    auto_class = getattr(transformers, task[0])
    assert any(name.endswith(suffix) for name in class_names(auto_class))


def class_names(auto_class: type) -> list[str]:
    return [
        name
        for names in auto_class._model_mapping._model_mapping.values()
        for name in ([names] if isinstance(names, str) else names)
    ]


def test_a_class_without_certain_task_is_loaded_by_its_own_name(tmp_path):
    model = get_comera_model(transformers.BertForPreTraining, ComeraConfig(rank=4), config=BertConfig(**BERT))
    path = write_model_card(model, tmp_path)
    assert "BertForPreTraining.from_pretrained" in path.read_text()
    assert ModelCard.load(path).data.pipeline_tag is None


@pytest.mark.parametrize("repo_id", ['me/a"b', "me/a b", "me/a/b", "", "me/a\nb"])
def test_a_name_of_no_repository_raises_and_nothing_is_written(model, tmp_path, repo_id):
    with pytest.raises(ValueError, match=r"repo_id=.* is no name of a repository .* 'me/codebert-comera'"):
        write_model_card(model, tmp_path, repo_id=repo_id)
    with pytest.raises(ValueError, match="is no name of a repository"):
        push_to_hub(model, repo_id)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("training_data", "Text <!-- hf_comera:end --> and more."),
        ("training_command", "python train.py # <!-- hf_comera:begin -->"),
        ("license", "<!-- hf_comera:end -->"),
        ("metrics", [{"name": "<!-- hf_comera:begin", "value": 1, "measured_on": "all"}]),
    ],
)
def test_the_comments_of_our_part_in_a_text_raise_and_the_card_stays(model, tmp_path, field, value):
    before = write_model_card(model, tmp_path).read_text()
    with pytest.raises(ValueError, match=f"{field} holds '<!-- hf_comera:'.* Leave it out"):
        write_model_card(model, tmp_path, **{field: value})
    assert (tmp_path / "README.md").read_text() == before
    write_model_card(model, tmp_path)


def test_the_id_of_the_save_beside_the_card_is_told(model, tmp_path):
    assert "carry the id" not in write_model_card(model, tmp_path).read_text()
    for _ in range(2):
        model.save_pretrained(tmp_path)
        save_id = model.config.quantization_config.save_id
        assert f"carry the id `{save_id}`" in write_model_card(model, tmp_path).read_text()
    (tmp_path / "README.md").write_text("another text")
    assert is_comera_model(AutoModelForMaskedLM.from_pretrained(tmp_path)), "the card is never checked"


def test_the_template_stands_under_model_cards():
    assert (ROOT / "model_cards/template.md").samefile(ROOT / "hf_comera/hub/model_card_template.md")


@pytest.mark.parametrize("layers", [None, []], ids=["compressed", "dense"])
def test_bytes_are_those_of_the_checkpoint_and_its_integers_are_told(layers, tmp_path):
    settings = ComeraConfig(rank=8, target_modules=layers, storage={"word_embeddings": "int4", "*": "int8"})
    model = get_comera_model(ARCHITECTURES["bert-mlm"].new_model(), settings)
    model.save_pretrained(tmp_path)
    text = write_model_card(model, tmp_path).read_text()
    report = size_report(model)
    assert report.stored_bytes < 0.5 * report.bytes
    ratio = report.dense_bytes / report.stored_bytes
    assert f"| bytes | {report.dense_bytes:,} | {report.stored_bytes:,} | {ratio:.1f} |" in text
    assert "rows of int4 and int8 with scales; loaded, they are floating-point numbers." in text
    assert ("as small factors" in text, "<details>" in text) == ((layers is None,) * 2)
    assert write_model_card(find_model(str(tmp_path)).compressed_skeleton(), tmp_path).read_text() == text
