"""Models with ``embedding_width``: every way in and out, heads, sizes, training; what cannot have one says so."""

import copy
import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    ElectraConfig,
    GemmaConfig,
    OPTConfig,
)

from hf_comera import (
    ComeraConfig,
    RankAdaptation,
    TTMuon,
    add_rank_gates,
    comera_param_groups,
    estimate_memory,
    explain,
    get_comera_model,
    plan,
    size_report,
    write_model_card,
)
from hf_comera.memory import SavedBytes
from hf_comera.modules import FactorizedEmbedding, TiedEmbedding, TiedHead, TTMEmbedding
from hf_comera.modules.halves_cache import note_parameter_edit
from tests.architectures import ARCHITECTURES, SIZES, VOCABULARY, WORDS, Architecture
from tests.training.rank_training import train_ranks

NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
WIDTH = 11
OPT = OPTConfig(
    **WORDS, hidden_size=48, word_embed_proj_dim=36, num_hidden_layers=1, num_attention_heads=4, ffn_dim=96,
    max_position_embeddings=32, dropout=0.0,
)  # fmt: skip
MODELS = {
    **{name: row for name, row in ARCHITECTURES.items() if name != "vit"},
    "opt": Architecture(AutoModelForCausalLM, OPT, 7, 1),
    "electra": Architecture(AutoModelForMaskedLM, ElectraConfig(**SIZES, **WORDS, embedding_size=36), 13, 1),
}
every_model = pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)
FORMS = {"plain": {}, "train": {"embedding_num_factors": 3}}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
GPT2, BERT = MODELS["gpt2"], MODELS["bert-mlm"]


def new_model(architecture, dtype=None, **settings):
    config = ComeraConfig(**{"rank": 4, "embedding_width": WIDTH, **settings})
    return get_comera_model(architecture.auto_class, config, config=architecture.new_config(), dtype=dtype).eval()


def words_of(model):
    (found,) = (module for module in model.modules() if isinstance(module, FactorizedEmbedding))
    return found


@every_model
@every_form
def test_the_plan_comes_true_and_sizes_are_those_of_the_dense_model(architecture, form):
    settings = ComeraConfig(rank=4, embedding_width=WIDTH, **form)
    dense = architecture.new_model()
    compression, model = plan(dense, settings), new_model(architecture, **form)
    assert list(model.comera_plan()) == list(compression)
    assert len(compression.layers) == architecture.num_layers
    tied = [module for module in model.modules() if isinstance(module, TiedHead | TiedEmbedding)]
    assert len(compression.ties) == len(tied) == architecture.num_tied
    assert all(module.source is words_of(model) for module in tied)
    report = size_report(model)
    assert report.parameters == compression.parameters == sum(p.numel() for p in model.parameters())
    assert report.dense_parameters == sum(p.numel() for p in dense.parameters())
    (layer,) = (layer for layer in compression if layer.kind == "factorized_embedding")
    assert layer.width == words_of(model).width == WIDTH
    assert layer.parameters == words_of(model).num_core_parameters
    assert f"factorized_embedding ({WIDTH} wide)" in str(compression)


@every_model
@every_form
def test_a_saved_model_is_loaded_bit_for_bit(architecture, form, tmp_path):
    model, inputs = new_model(architecture, **form), architecture.inputs()
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (written["format_version"], written["embedding_width"]) == (4, WIDTH)
    loaded, info = architecture.auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert info == NOTHING
    assert torch.equal(loaded(**inputs).logits, expected)
    assert loaded.config.quantization_config == model.config.quantization_config
    rounded = architecture.auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}


@every_model
@every_form
def test_a_merged_model_is_an_ordinary_one(architecture, form):
    model, inputs = new_model(architecture, dtype=torch.float64, **form), architecture.inputs()
    expected = model(**inputs).logits
    types = {name: type(module) for name, module in architecture.new_model().named_modules()}
    model.merge_and_unload()
    assert {name: type(module) for name, module in model.named_modules()} == types
    torch.testing.assert_close(model(**inputs).logits, expected)


@every_model
@every_form
def test_a_dense_checkpoint_gives_what_the_live_model_does(architecture, form, tmp_path):
    dense, inputs = architecture.new_model(), architecture.inputs()
    settings = ComeraConfig(rank=4, embedding_width=WIDTH, **form)
    dense.save_pretrained(tmp_path)
    loaded = architecture.auto_class.from_pretrained(tmp_path, quantization_config=settings)
    table = dense.get_input_embeddings().weight.detach().clone()
    live = get_comera_model(dense, settings).eval()
    assert torch.equal(loaded(**inputs).logits, live(**inputs).logits)
    (error,) = (layer.error for layer in live.comera_plan() if layer.width)
    expected = (words_of(live).dense() - table).norm() / table.norm()
    assert error == pytest.approx(expected.item(), abs=1e-5)
    if not form:  # as near as a matrix of that rank can be
        left = torch.linalg.svdvals(table.double())[WIDTH:].norm() / table.norm()
        assert error == pytest.approx(left.item(), rel=1e-4)


def test_only_the_table_of_an_otherwise_dense_model():
    model = new_model(GPT2, target_modules=["wte"])
    assert [layer.name for layer in model.comera_plan()] == ["transformer.wte"]
    assert isinstance(model.lm_head, TiedHead)
    optimizer = TTMuon(model)
    assert {group["group_name"] for group in optimizer.param_groups} == {"weights", "biases and norms"}


def test_an_untied_head_stays_as_it_is():
    model = new_model(MODELS["llama-untied"])
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight.shape == (VOCABULARY, 48)


def test_rows_and_tables_start_with_the_deviation_of_the_architecture():
    for form in FORMS.values():
        words = words_of(new_model(MODELS["t5"], **form))
        dense = MODELS["t5"].new_model().shared.weight
        assert words.dense().std().item() == pytest.approx(dense.std().item(), rel=0.05)
    words = words_of(new_model(MODELS["roberta"]))
    assert not words.dense()[1].any()
    assert words.padding_idx == 1


@every_form
def test_copies_and_pickles_keep_the_link(form):
    model, inputs = new_model(GPT2, **form), GPT2.inputs()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.lm_head.source is twin.transformer.wte is not model.transformer.wte
        assert torch.equal(twin(**inputs).logits, model(**inputs).logits)


def test_tokens_are_generated_as_by_the_merged_model():
    model = new_model(GPT2)
    ids = torch.randint(2, VOCABULARY, (2, 4))
    found = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.merge_and_unload().generate(ids, max_new_tokens=5, do_sample=False), found)


@pytest.mark.parametrize("make", [TTMuon, lambda model: torch.optim.AdamW(comera_param_groups(model, 1e-3))])
@every_form
def test_table_and_projection_are_trained_as_weights(make, form):
    model = new_model(GPT2, **form).train()
    optimizer = make(model)
    groups = {name: group["group_name"] for group in optimizer.param_groups for name in group["names"]}
    assert groups["transformer.wte.projection"] == "weights"
    assert groups["transformer.wte.table.core_0" if form else "transformer.wte.table"] == (
        "cores" if form else "weights"
    )
    ids = torch.randint(2, VOCABULARY, (2, 9))
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@every_form
def test_rank_adaptation_meets_its_size_and_leaves_the_width_alone(form, tmp_path):
    model = new_model(GPT2, **form).train()
    before, ids = size_report(model), torch.randint(2, VOCABULARY, (2, 9))
    add_rank_gates(model)
    wanted = before.parameters - 300
    settings = RankAdaptation(target_parameters=wanted)
    train_ranks(model, TTMuon(model), settings, 6, lambda: model(input_ids=ids, labels=ids).loss)
    after = size_report(model)
    assert after.parameters <= wanted
    assert after.dense_parameters == before.dense_parameters
    assert words_of(model).width == WIDTH
    assert [name for name in model.rank_report().after if "wte" in name] == (["transformer.wte.table"] if form else [])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_rank_gates_of_a_narrow_table_are_saved(tmp_path):
    model = new_model(GPT2, embedding_num_factors=3)
    add_rank_gates(model)
    model.transformer.wte.table.rank_gate_0.data.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    inputs = GPT2.inputs()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info == NOTHING
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_ranks_of_a_narrow_table_come_from_the_file(tmp_path):
    model = new_model(GPT2, embedding_num_factors=3)
    table = model.transformer.wte.table
    table.load_cores(TTMEmbedding(VOCABULARY, WIDTH, in_factors=table.in_factors, out_factors=table.out_factors,
                                  ranks=(2, 3)).cores())  # fmt: skip
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["layers"]["transformer.wte"]["ranks"] = [1, 1]  # stale on purpose
    path.write_text(json.dumps(config))
    loaded, inputs = AutoModelForCausalLM.from_pretrained(tmp_path), GPT2.inputs()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


LOST = {
    "table": ({}, "transformer.wte.table", "lacks cores, gates or biases of transformer.wte"),
    "projection": ({}, "transformer.wte.projection", "lacks cores, gates or biases of transformer.wte"),
    "cores": ({"embedding_num_factors": 3}, "transformer.wte.table.core_2", "'transformer.wte.table'"),
}


@pytest.mark.parametrize("only", [{}, {"target_modules": ["wte"]}], ids=["all", "only the table"])
@pytest.mark.parametrize(("form", "lost", "message"), LOST.values(), ids=LOST)
def test_a_file_that_lacks_a_part_is_refused(form, lost, message, only, tmp_path):
    new_model(GPT2, **form, **only).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_part_of_another_shape_is_refused(tmp_path):
    new_model(GPT2).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    tensors["transformer.wte.projection"] = torch.zeros(WIDTH + 1, 48)
    save_file(tensors, file, metadata=metadata)
    with pytest.raises((ValueError, RuntimeError), match=r"projection|ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_counts_of_tokens_go_into_the_table():
    dense = GPT2.new_model()
    table, counts = dense.transformer.wte.weight.detach().clone(), torch.arange(VOCABULARY) ** 2
    settings = ComeraConfig(rank=4, embedding_width=WIDTH)
    plain = words_of(get_comera_model(copy.deepcopy(dense), settings)).dense()
    weighted = words_of(get_comera_model(dense, settings, token_counts=counts)).dense()
    errors = [(counts[:, None] * (found - table).square()).sum() for found in (weighted, plain)]
    assert errors[0] < errors[1]


BART = BartConfig(
    **WORDS, d_model=48, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=96, decoder_ffn_dim=96,
    encoder_attention_heads=4, decoder_attention_heads=4, scale_embedding=True,
)  # fmt: skip
GEMMA = GemmaConfig(**SIZES, **WORDS, head_dim=12, num_key_value_heads=2)
COUNTS = torch.ones(VOCABULARY)


def build(auto_class, config, **settings):
    return get_comera_model(auto_class, ComeraConfig(rank=4, embedding_width=WIDTH, **settings), config=config)


REFUSED = {
    "scaled rows of BART": (
        lambda: build(AutoModelForSeq2SeqLM, BART),
        r"embedding_width=11 is for embeddings, but none is compressed in BartFor.*BartScaledWordEmbedding",
    ),
    "scaled rows of Gemma": (
        lambda: build(AutoModelForCausalLM, GEMMA, target_modules="all-linear"),
        "none is compressed in GemmaForCausalLM.*GemmaTextScaledWordEmbedding",
    ),
    "an excluded table": (
        lambda: build(AutoModelForCausalLM, GPT2.new_config(), exclude_modules=["wte"]),
        "Name one of exactly the type Embedding in target_modules, or use embedding_width=None",
    ),
    "a wide one": (
        lambda: new_model(GPT2, embedding_width=48),
        "embedding_width of transformer.wte=48 is needed from 1 to 40.*example 12",
    ),
    "one of two tables": (
        lambda: new_model(GPT2, embedding_width=30, target_modules=["wte", "wpe"]),
        "embedding_width of transformer.wpe=30 is needed from 1 to 27",
    ),
    "not positive": (
        lambda: ComeraConfig(embedding_width=0),
        "embedding_width=0 is not a positive.*embedding_width=128",
    ),
    "no integer": (lambda: ComeraConfig(embedding_width=1.5), "embedding_width=1.5"),
    "factors of the full width": (
        lambda: new_model(GPT2, factor_pattern={"wte": {"out_factors": [2, 4]}}),
        r"out_factors of transformer.wte=\(2, 4\) multiply to 8, but the layer has size 11",
    ),
    "counts for a new model": (
        lambda: get_comera_model(
            AutoModelForCausalLM, ComeraConfig(embedding_width=WIDTH), config=GPT2.new_config(), token_counts=COUNTS
        ),
        "token_counts weigh the rows of a trained embedding, but a new model has none",
    ),
    "counts without a width": (
        lambda: get_comera_model(GPT2.new_model(), ComeraConfig(rank=2), token_counts=COUNTS),
        r"token_counts are for factorized embeddings.*ComeraConfig\(embedding_width=128\)",
    ),
    "counts of another vocabulary": (
        lambda: get_comera_model(GPT2.new_model(), ComeraConfig(embedding_width=WIDTH), token_counts=COUNTS[:9]),
        r"token_counts has shape \(9,\)",
    ),
    "max_norm": (lambda: plan(with_max_norm(), ComeraConfig(rank=2)), "'transformer.wte' has max_norm=1.0"),
    "other sizes of the vocabulary": (
        lambda: new_model(GPT2).resize_token_embeddings(300),
        r"resize_token_embeddings\(300\): the embedding 'transformer.wte' is compressed",
    ),
}


def with_max_norm():
    model = GPT2.new_model()
    model.transformer.wte.max_norm = 1.0
    return model


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_says_so(call, message):
    with pytest.raises(ValueError, match=message):
        call()


RECORDED = {
    "no width": ({"width": None}, "width=None is needed as a positive integer of a factorized embedding alone"),
    "another kind": ({"kind": "ttm_embedding"}, "width=11 is needed as a positive integer of a factorized"),
    "too many ranks": ({"ranks": [3]}, "these factors have 0 bonds"),
}


@pytest.mark.parametrize(("change", "message"), RECORDED.values(), ids=RECORDED)
def test_a_record_that_cannot_be_is_refused(change, message):
    entry = new_model(GPT2).config.quantization_config.layers["transformer.wte"]
    with pytest.raises(ValueError, match=message):
        ComeraConfig.from_dict({"layers": {"transformer.wte": {**entry, **change}}})


def test_settings_without_a_width_are_written_as_before():
    written = ComeraConfig(rank=3).to_dict()
    assert "embedding_width" not in written
    assert "embedding_num_factors" not in written
    for config in (ComeraConfig(rank=3), ComeraConfig(embedding_width=7), ComeraConfig(embedding_num_factors=2)):
        assert ComeraConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@every_form
def test_reports_name_it(form, tmp_path):
    model = new_model(BERT, **form)
    row = explain(model, 2, 16).rows[0]
    assert row.label == "embeddings.word_embeddings"
    assert row.path == "lookup"
    model.save_pretrained(tmp_path)
    card = write_model_card(model, tmp_path).read_text()
    assert "1 factorized embedding and 12 linear layers" in card


@every_form
def test_memory_is_estimated_as_it_is_taken(form):
    model = new_model(BERT, **form).train()
    batch = {name: value.repeat_interleave(8, 0) for name, value in BERT.training_inputs().items()}
    estimate = estimate_memory(model, inputs=batch, policies=["keep"])
    note_parameter_edit()
    with SavedBytes(model.parameters()) as saved:
        loss = model(**batch).loss
    assert loss.requires_grad
    assert estimate.policies["keep"].activations == pytest.approx(saved.total, rel=0.1)
    assert estimate.weights >= sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("policy", ["rank", "rank+fp8", "fp8"])
def test_activation_policies_serve(policy):
    model, own = (new_model(BERT).train() for _ in range(2))
    own.load_state_dict(model.state_dict())
    inputs = BERT.training_inputs()
    losses = []
    for each, chosen in ((model, policy), (own, None)):
        each.set_activation_policy(chosen)
        torch.manual_seed(1)
        loss = each(**inputs).loss
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses)
    gradients = [words_of(each).projection.grad for each in (model, own)]
    torch.testing.assert_close(*gradients, rtol=0.1, atol=0.1 * gradients[1].abs().max().item())


def test_a_model_on_the_meta_device_and_a_compiled_one():
    with torch.device("meta"):
        assert new_model(GPT2).transformer.wte.table.is_meta
    model, inputs = new_model(GPT2), GPT2.inputs()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
