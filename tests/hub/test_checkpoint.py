"""hf_comera/hub/checkpoint.py: files that are damaged, changed or of two saves are refused by name; nothing hangs."""

import copy
import json
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification, AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from hf_comera import ComeraConfig, add_rank_gates, get_comera_model, is_comera_model
from hf_comera.hub.checkpoint import RECORDS, SAVE_ID, check_checkpoint

SAVED = Path(__file__).parent / "saved"
IDS = torch.arange(2, 14).view(2, 6)
QUERY = "bert.encoder.layer.0.attention.self.query"
WORDS = "bert.embeddings.word_embeddings"
HEAD = "cls.predictions.transform.dense"


def new_config():
    return BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=61,
        max_position_embeddings=16, type_vocab_size=1,
    )  # fmt: skip


def new_model(**settings):
    return get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=3, **settings), config=new_config()).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    new_model().save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A folder of its own for each test, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def drop_metadata(folder):
    """As a tool leaves the file that reads and writes tensors only."""
    file = folder / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt"})


def load(folder):
    return AutoModelForMaskedLM.from_pretrained(folder)


def edit_tensors(folder, edit):
    """Change the tensors of a file and keep its metadata."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata=metadata)


def edit_header(folder, edit):
    """Change what the header says of the tensors, and not a byte of them."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def edit_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "auto_class"), [("first_bert", AutoModelForMaskedLM), ("first_vit", AutoModelForImageClassification)]
)
def test_checkpoints_of_the_first_release_load(name, auto_class):
    """Without ids of saves; BERT's has gates, ViT's is sharded and has the names of an original release."""
    expected = load_file(SAVED / name / "expected.safetensors")
    logits = expected.pop("logits")
    model = auto_class.from_pretrained(SAVED / name / "model").eval()
    assert model.config.quantization_config.save_id is None
    with torch.no_grad():
        torch.testing.assert_close(model(**expected).logits, logits)
    assert any("rank_gate" in name for name, _ in model.named_parameters()) == (name == "first_bert")


def test_every_file_of_a_save_and_its_config_carry_one_id(tmp_path):
    model = new_model()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    ids = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            ids.add(opened.metadata()[SAVE_ID])
            assert opened.metadata()["format"] == "pt"
            assert opened.metadata()[RECORDS]
    assert ids == {json.loads((tmp_path / "config.json").read_text())["quantization_config"]["save_id"]}
    assert ids == {model.config.quantization_config.save_id}
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.save_id not in ids
    assert not hasattr(model, "hf_quantizer")


def test_saving_leaves_random_numbers_alone(tmp_path):
    model = new_model()
    state = torch.get_rng_state()
    model.save_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_shards_of_two_saves_are_refused_by_name(tmp_path):
    for name in ("old", "new"):
        new_model().save_pretrained(tmp_path / name, max_shard_size="4KB")
    shard = sorted((tmp_path / "new").glob("*.safetensors"))[0]
    shard.write_bytes((tmp_path / "old" / shard.name).read_bytes())
    with pytest.raises(
        ValueError, match=rf"different saves: {shard.name} is of save \w+; .*is of save .*Copy the whole"
    ):
        load(tmp_path / "new")


def test_weights_beside_the_config_of_another_save_are_refused(tmp_path):
    for name in ("old", "new"):
        new_model().save_pretrained(tmp_path / name)
    (tmp_path / "new" / "config.json").write_bytes((tmp_path / "old" / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"model.safetensors is of save \w+; config.json is of save \w+\."):
        load(tmp_path / "new")


def test_weights_beside_a_config_without_an_id_are_refused(checkpoint):
    edit_config(checkpoint, lambda settings: settings.pop("save_id"))
    with pytest.raises(ValueError, match=r"config.json is of save \(without an id\)"):
        load(checkpoint)


def test_weights_written_anew_without_an_id_load(checkpoint):
    expected = load(checkpoint).eval()(IDS).logits
    drop_metadata(checkpoint)
    assert torch.equal(load(checkpoint).eval()(IDS).logits, expected)


def retype(dtype):
    return lambda tensors: tensors.update({f"{QUERY}.core_1": tensors[f"{QUERY}.core_1"].to(dtype)})


def gate_everything(tensors):
    for name in [name for name in tensors if name.startswith(f"{QUERY}.core_")][:-1]:
        tensors[name.replace("core_", "rank_gate_")] = torch.full((tensors[name].shape[-1],), 0.5)


TENSOR_DAMAGE = {
    "integer-core": (retype(torch.int32), rf"model\.safetensors: {QUERY}\.core_1 has dtype I32.*floating-point"),
    "small-integer-core": (retype(torch.uint8), "has dtype U8"),
    "long-core": (retype(torch.int64), "has dtype I64"),
    "boolean-core": (retype(torch.bool), "has dtype BOOL"),
    "complex-core": (retype(torch.complex64), "has dtype C64"),
    "8-bit-float-core": (retype(torch.float8_e4m3fn), "has dtype F8_E4M3"),
    "scalar-core": (lambda t: t.update({f"{QUERY}.core_1": torch.ones(())}), r"core_1 has shape \(\), but is needed"),
    "flat-core": (lambda t: t.update({f"{QUERY}.core_1": torch.ones(7)}), r"core_1 has shape \(7,\)"),
    "first-core-gone": (lambda t: t.pop(f"{QUERY}.core_0"), rf"'{QUERY}' lacks core_0"),
    "last-core-gone": (lambda t: t.pop(f"{QUERY}.core_5"), rf"has 5 cores for '{QUERY}'.*has factors for 6"),
    "all-cores-gone": (
        lambda t: [t.pop(f"{QUERY}.core_{index}") for index in range(6)], rf"no cores for '{QUERY}'.*Copy|copy"
    ),
    "bias-gone": (lambda t: t.pop(f"{QUERY}.bias"), rf"lacks cores, gates or biases of {QUERY}"),
    "gates-without-record": (gate_everything, rf"has rank gates for '{QUERY}', but config.json records none"),
    "gate-without-bond": (lambda t: t.update({f"{QUERY}.rank_gate_9": torch.ones(3)}), "lacks rank_gate_0"),
    "one-core-too-many": (lambda t: t.update({f"{QUERY}.core_6": torch.ones(1, 2, 1)}), "has 7 cores"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), TENSOR_DAMAGE.values(), ids=TENSOR_DAMAGE.keys())
def test_damaged_tensors_are_refused_by_name(checkpoint, edit, message):
    edit_tensors(checkpoint, edit)
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


def test_a_header_that_calls_the_bytes_of_a_core_integers_is_refused(checkpoint):
    edit_header(checkpoint, lambda header: header[f"{QUERY}.core_4"].update(dtype="I32"))
    with pytest.raises(ValueError, match=r"core_4 has dtype I32"):
        load(checkpoint)


def test_recorded_gates_that_the_file_lacks_are_missed(tmp_path):
    model = new_model()
    add_rank_gates(model)
    model.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: [t.pop(name) for name in list(t) if name.startswith(f"{QUERY}.rank_gate")])
    with pytest.raises(ValueError, match=rf"has no rank gates for '{QUERY}', but config.json records some"):
        load(tmp_path)


@pytest.fixture(scope="module")
def saved_in_int8_and_int4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    new_model(storage={"query": "int4", "*": "int8"}, rank_pattern={"query": 8, "key": 8}).save_pretrained(folder)
    return folder


POSITIONS = "bert.embeddings.position_embeddings.weight"


def edit_packed(name, edit):
    return lambda tensors: tensors.update({name: edit(tensors[name]).contiguous()})


CORE, KEY_CORE = f"{QUERY}.core_2", f"{QUERY.replace('query', 'key')}.core_2"
"""In int4, and in int8."""

PACKED_DAMAGE = {
    "core-without-scales": (edit_packed(CORE, lambda t: t[:, :-2]), f"cores of '{QUERY}' .* do not fit"),
    "core-cut-in-a-row": (edit_packed(CORE, lambda t: t[:, :1]), "U8 and shape .* 1 bytes are no packed"),
    "core-of-8-bits-cut": (edit_packed(KEY_CORE, lambda t: t[:, :2]), "I8 and shape .* 2 bytes are no packed"),
    "core-of-other-factors": (edit_packed(KEY_CORE, lambda t: t[:, 1:]), rf"{KEY_CORE} holds .* needs .* \(r, 2, r\)"),
    "core-of-fewer-rows": (edit_packed(KEY_CORE, lambda t: t[1:]), "do not fit together"),
    "flat-core": (edit_packed(CORE, torch.flatten), rf"{CORE} has dtype U8 and shape \(\d+,\), in which no"),
    "scalar-core": (edit_packed(CORE, lambda t: t[0, 0]), r"shape \(\), in which no weight"),
    "core-of-three-axes": (edit_packed(CORE, lambda t: t[None]), "in which no weight is stored"),
    "core-of-32-bits": (edit_packed(CORE, lambda t: t.int()), "has dtype I32"),
    "core-of-two-axes": (edit_packed(CORE, lambda t: t.float()), "is needed with 3 or 4 axes"),
    "packed-gate": (lambda t: t.update({f"{QUERY}.rank_gate_0": torch.ones(3, dtype=torch.int8)}), "rank_gate"),
    "core-gone": (lambda t: t.pop(CORE), "lacks core_2"),
    "leftover-without-scales": (edit_packed(POSITIONS, lambda t: t[:, :-2]), f"{POSITIONS} holds 16 rows of 14"),
    "leftover-of-fewer-rows": (edit_packed(POSITIONS, lambda t: t[1:]), r"holds 15 rows of 16 .*\(16, 16\)"),
    "leftover-in-other-bits": (edit_packed(POSITIONS, lambda t: t.view(torch.uint8)), f"{POSITIONS} holds 16 rows of"),
    "flat-leftover": (edit_packed(POSITIONS, torch.flatten), rf"{POSITIONS} has dtype I8 and shape \(288,\)"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), PACKED_DAMAGE.values(), ids=PACKED_DAMAGE.keys())
def test_damaged_tensors_in_int8_and_int4_are_refused_by_name(saved_in_int8_and_int4, tmp_path, edit, message):
    folder = Path(shutil.copytree(saved_in_int8_and_int4, tmp_path / "checkpoint"))
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_tensors_in_int8_are_refused_where_the_config_tells_of_none(saved_in_int8_and_int4, tmp_path):
    folder = Path(shutil.copytree(saved_in_int8_and_int4, tmp_path / "checkpoint"))
    edit_config(folder, lambda settings: settings.pop("storage"))
    with pytest.raises(ValueError, match=r"has dtype [IU]8, but cores and gates are floating-point"):
        load(folder)


def test_an_int8_file_cut_short_is_refused(saved_in_int8_and_int4, tmp_path):
    folder = Path(shutil.copytree(saved_in_int8_and_int4, tmp_path / "checkpoint"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load(folder)


def entry(**changes):
    return lambda settings: settings["layers"][QUERY].update(changes)


RECORD_DAMAGE = {
    "entry-is-a-list": lambda s: s["layers"].update({QUERY: [1, 2]}),
    "entry-is-null": lambda s: s["layers"].update({QUERY: None}),
    "no-kind": lambda s: s["layers"][QUERY].pop("kind"),
    "unknown-kind": entry(kind="tt_conv"),
    "kind-is-a-list": entry(kind=["tt_linear"]),
    "kind-of-an-embedding": entry(kind="ttm_embedding"),
    "no-ranks": lambda s: s["layers"][QUERY].pop("ranks"),
    "ranks-are-a-number": entry(ranks=3),
    "ranks-are-a-text": entry(ranks="33333"),
    "negative-rank": entry(ranks=[3, 3, -3, 3, 3]),
    "rank-is-a-fraction": entry(ranks=[3, 3, 3.5, 3, 3]),
    "too-few-ranks": entry(ranks=[3, 3]),
    "partly-removed": entry(ranks=[3, 0, 3, 3, 3]),
    "factors-are-null": entry(in_factors=None),
    "factor-is-a-text": entry(in_factors=["2", 2, 4]),
    "factor-of-zero": entry(in_factors=[0, 2, 4]),
    "factors-of-another-size": entry(in_factors=[2, 2, 5]),
    "no-factors": entry(out_factors=[]),
    "endless-factors": entry(in_factors=[2] * 5000, ranks=[1] * 5002),
    "error-is-a-text": entry(error="small"),
    "error-is-not-a-number": entry(error=float("nan")),
    "gates-are-a-text": entry(rank_gates="yes"),
    "gates-that-the-file-lacks": entry(rank_gates=True),
    "rank-activation-of-a-layer": entry(rank_activation="silu"),
    "layers-are-a-list": lambda s: s.update(layers=[QUERY]),
    "layers-are-a-text": lambda s: s.update(layers=QUERY),
    "layers-are-a-number": lambda s: s.update(layers=7),
    "layers-are-null": lambda s: s.update(layers=None),
    "layers-are-empty": lambda s: s.update(layers={}),
    "no-layers": lambda s: s.pop("layers"),
    "a-layer-of-no-model": lambda s: s["layers"].update({"no.such.layer": s["layers"][QUERY]}),
    "a-path-for-a-name": lambda s: s["layers"].update({"../../etc/passwd": s["layers"][QUERY]}),
    "a-layer-that-is-a-block": lambda s: s["layers"].update({"bert.encoder": s["layers"].pop(QUERY)}),
    "a-layer-that-is-a-norm": lambda s: s["layers"].update({"bert.embeddings.LayerNorm": s["layers"].pop(QUERY)}),
    "a-layer-is-missing": lambda s: s["layers"].pop(QUERY),
    "rank-is-a-text": lambda s: s.update(rank="30"),
    "rank-pattern-is-a-list": lambda s: s.update(rank_pattern=["query"]),
    "rank-pattern-is-a-number": lambda s: s.update(rank_pattern=3),
    "factor-pattern-is-a-text": lambda s: s.update(factor_pattern="query"),
    "factor-pattern-of-numbers": lambda s: s.update(factor_pattern={"query": {"in_factors": 3}}),
    "targets-are-a-number": lambda s: s.update(target_modules=3),
    "targets-are-numbers": lambda s: s.update(target_modules=[3, 4]),
    "rank-activation": lambda s: s.update(rank_activation="silu", format_version=2),
    "storage-is-a-number": lambda s: s.update(storage=8),
    "storage-has-another-name": lambda s: s.update(storage={"*": "int3"}),
    "format-is-negative": lambda s: s.update(format_version=-5),
    "format-is-zero": lambda s: s.update(format_version=0),
    "format-is-true": lambda s: s.update(format_version=True),
    "format-is-a-text": lambda s: s.update(format_version="1"),
    "format-is-newer": lambda s: s.update(format_version=99),
}  # fmt: skip


ONLY_THE_DIGEST_TELLS = {"a-layer-is-missing"}


@pytest.mark.parametrize("name", RECORD_DAMAGE)
def test_a_damaged_record_is_refused_by_file_and_layer(checkpoint, name):
    edit_config(checkpoint, RECORD_DAMAGE[name])
    before = (checkpoint / "config.json").read_text()
    with pytest.raises(ValueError, match=r"config\.json|format_version=99"):
        load(checkpoint)
    assert (checkpoint / "config.json").read_text() == before


@pytest.mark.parametrize("name", sorted(RECORD_DAMAGE.keys() - ONLY_THE_DIGEST_TELLS))
def test_a_damaged_record_is_refused_without_a_digest_too(checkpoint, name):
    drop_metadata(checkpoint)
    edit_config(checkpoint, RECORD_DAMAGE[name])
    with pytest.raises(ValueError, match=r"config\.json|format_version=99"):
        load(checkpoint)


HARMLESS = {
    "other-ranks": entry(ranks=[1, 1, 1, 1, 1]),
    "another-default-rank": lambda s: s.update(rank=7),
    "an-error": entry(error=0.25),
    "no-rank-activation": lambda s: s.update(rank_activation=None),
    "a-setting-of-a-newer-release": lambda s: s.update(new_setting=[1]),
    "targets-that-are-not-there": lambda s: s.update(target_modules=["nothing"]),
}


@pytest.mark.parametrize("edit", HARMLESS.values(), ids=HARMLESS.keys())
def test_a_record_that_differs_in_nothing_that_counts_loads_equal(checkpoint, edit):
    expected = load(checkpoint).eval()(IDS).logits
    edit_config(checkpoint, edit)
    assert torch.equal(load(checkpoint).eval()(IDS).logits, expected)


def test_an_expression_that_never_ends_is_not_tried(checkpoint):
    def bomb(settings):
        settings.update(layers=None, target_modules="(a|a)*(.*a){40}b", exclude_modules="((a+)+)+b")

    edit_config(checkpoint, bomb)
    start = time.perf_counter()
    with pytest.raises(ValueError, match="names no compressed layer"):
        load(checkpoint)
    assert time.perf_counter() - start < 10


def test_two_hundred_thousand_layers_of_no_model_are_refused_at_once(checkpoint):
    drop_metadata(checkpoint)
    settings = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    settings["layers"] |= {f"layer.{index}": settings["layers"][QUERY] for index in range(200_000)}
    start = time.perf_counter()
    config = ComeraConfig.from_dict(settings)
    with pytest.raises(ValueError, match=r"no cores for 'layer\.0'.*lists 200007 compressed layers"):
        check_checkpoint([str(checkpoint / "model.safetensors")], config)
    assert time.perf_counter() - start < 20


def dense_with_record(folder):
    """A dense model made from the config of a compressed one, as somebody makes a baseline."""
    new_model().save_pretrained(folder / "compressed")
    config = BertConfig.from_pretrained(folder / "compressed")
    dense = AutoModelForMaskedLM.from_config(config).eval()
    dense.save_pretrained(folder / "dense")
    return dense, folder / "dense"


def test_a_dense_model_saved_under_the_config_of_a_compressed_one_loads_dense_and_says_so(tmp_path, caplog):
    dense, folder = dense_with_record(tmp_path)
    with caplog.at_level("WARNING", logger="hf_comera"):
        loaded = load(folder)
    assert "holds the dense weights of every layer" in caplog.text
    assert not is_comera_model(loaded)
    assert not loaded.is_quantized
    assert not hasattr(loaded, "hf_quantizer")
    assert loaded.state_dict().keys() == dense.state_dict().keys()
    assert torch.equal(loaded(IDS).logits, dense(IDS).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    caplog.clear()
    assert torch.equal(load(tmp_path / "again")(IDS).logits, dense(IDS).logits)
    assert "dense weights" not in caplog.text
    get_comera_model(loaded, ComeraConfig(rank=3))


@pytest.mark.parametrize("lost", [f"{QUERY}.weight", f"{WORDS}.weight"])
def test_a_dense_file_that_lacks_a_weight_of_the_record_is_refused(tmp_path, lost):
    _, folder = dense_with_record(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop(lost))
    with pytest.raises(ValueError, match=rf"lacks dense weights of {lost.removesuffix('.weight')}"):
        load(folder)


def test_a_file_with_some_layers_dense_is_refused(checkpoint):
    def make_dense(tensors):
        for index in range(6):
            del tensors[f"{QUERY}.core_{index}"]
        tensors[f"{QUERY}.weight"] = torch.ones(16, 16)

    edit_tensors(checkpoint, make_dense)
    with pytest.raises(ValueError, match=rf"no cores for '{QUERY}'"):
        load(checkpoint)


def test_a_state_that_is_handed_over_needs_no_files(checkpoint):
    model = load(checkpoint).eval()
    state = load_file(checkpoint / "model.safetensors")
    loaded = BertForMaskedLM.from_pretrained(None, config=copy.deepcopy(model.config), state_dict=state)
    assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)


def test_the_config_of_a_model_that_is_in_memory_loads_the_file(checkpoint):
    model = load(checkpoint).eval()
    loaded = AutoModelForMaskedLM.from_pretrained(checkpoint, config=model.config)
    assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)


def test_the_state_of_a_file_loads_without_a_stray_key(checkpoint):
    model = new_model()
    found = model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
    assert not found.unexpected_keys
    assert found.missing_keys == ["cls.predictions.decoder.bias"]  # tied to another one
    assert torch.equal(model(IDS).logits, load(checkpoint).eval()(IDS).logits)
