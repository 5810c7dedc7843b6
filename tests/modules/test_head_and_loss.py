"""hf_comera/modules/head_and_loss.py: the same loss and gradients as the model's own forward, without all logits."""

import copy
import pickle

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.operations import convert_to_fp32
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    DebertaV2Config,
    ElectraConfig,
    Gemma2Config,
    MixtralConfig,
    ModernBertConfig,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.auto import modeling_auto

from hf_comera import ComeraConfig, get_comera_model, set_head_and_loss
from hf_comera.modules.head_and_loss import (
    LOSS_FUNCTION,
    MEAN,
    DeferredLogits,
    HeadAndLoss,
    _loss_in_source,
    head_left_out,
)
from hf_comera.ops import fused_loss
from hf_comera.ops.fused_loss import fixed_shapes
from tests.architectures import ARCHITECTURES, SIZES, VOCABULARY, WORDS, Architecture

DROPOUTS = {
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "activation_dropout"),
    *("dropout_rate", "resid_pdrop", "embd_pdrop", "attn_pdrop", "mlp_dropout", "embedding_dropout"),
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SERVED = {
    **{name: row for name, row in ARCHITECTURES.items() if name not in ("bert-classifier", "vit")},
    "albert": Architecture(AutoModelForMaskedLM, AlbertConfig(**SIZES, **WORDS, embedding_size=24), 0),
    "electra": Architecture(AutoModelForMaskedLM, ElectraConfig(**SIZES, **WORDS, embedding_size=24), 0),
    "modernbert": Architecture(
        AutoModelForMaskedLM, ModernBertConfig(**SIZES, **WORDS, **TOKENS, cls_token_id=1, sep_token_id=2), 0
    ),
    "bert as a decoder": Architecture(AutoModelForCausalLM, BertConfig(**SIZES, **WORDS, is_decoder=True), 0),
    "bart as a decoder": Architecture(
        AutoModelForCausalLM,
        BartConfig(
            **{"d_model": 48, "decoder_layers": 1, "decoder_ffn_dim": 96, "decoder_attention_heads": 4},
            **{"is_decoder": True, "is_encoder_decoder": False, **WORDS, **TOKENS},
        ),
        0,
    ),
    "mixtral": Architecture(
        AutoModelForCausalLM,
        MixtralConfig(**SIZES, **WORDS, num_local_experts=4, num_key_value_heads=2, experts_implementation="eager"),
        0,
    ),
}
DECLINED = {
    "gemma2": (AutoModelForCausalLM, Gemma2Config(**SIZES, **WORDS, head_dim=12, num_key_value_heads=2), "unchanged"),
    "deberta-v2": (AutoModelForMaskedLM, DebertaV2Config(**SIZES, **WORDS), "unchanged"),
    "a classifier": (AutoModelForSequenceClassification, BertConfig(**SIZES, **WORDS), "is no language model"),
}
served = pytest.mark.parametrize("architecture", SERVED.values(), ids=SERVED)
BERT, GPT2 = ARCHITECTURES["bert-mlm"], ARCHITECTURES["gpt2"]


def new_model(architecture, compressed=True, **settings):
    """In float64, training, without dropout."""
    config = architecture.new_config()
    for name in DROPOUTS & set(dir(config)):
        setattr(config, name, 0.0)
    if compressed:
        settings = ComeraConfig(**{"rank": 4, **settings})
        model = get_comera_model(architecture.auto_class, settings, config=config, dtype=torch.float64)
    else:
        model = architecture.auto_class.from_config(config, dtype=torch.float64)
    return model.train()


def pair(architecture, compressed=True, **settings):
    """The model with the block, and one equal to it without."""
    fused = new_model(architecture, compressed, **settings)
    own = copy.deepcopy(fused)
    set_head_and_loss(fused)
    set_head_and_loss(own, False)
    return fused, own


def batch_of(architecture, share=0.4):
    batch = architecture.training_inputs()
    labels = batch["labels"]
    chosen = torch.rand(labels.shape) < share
    chosen[0, -1] = True
    return {**batch, "labels": labels.masked_fill(~chosen, -100)}


def is_fused(outputs):
    return type(outputs).__module__ == "hf_comera.modules.head_and_loss"


def assert_equal_steps(fused, own, inputs):
    found, expected = fused(**inputs), own(**inputs)
    assert is_fused(found)
    assert not is_fused(expected)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    found.loss.backward()
    expected.loss.backward()
    for (name, mine), theirs in zip(fused.named_parameters(), own.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(found.logits, expected.logits)


@served
@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "dense"])
def test_loss_gradients_and_logits_are_those_of_the_models_own_forward(architecture, compressed):
    assert_equal_steps(*pair(architecture, compressed), batch_of(architecture))


@pytest.mark.parametrize("name", sorted(SERVED.keys() - {"bart as a decoder"}))  # whose rows are scaled
@pytest.mark.parametrize("number", [1, 3], ids=["plain", "train"])
def test_a_head_with_a_narrow_table_serves(name, number):
    architecture = SERVED[name]
    fused, own = pair(architecture, embedding_width=11, embedding_num_factors=number)
    assert type(fused.get_input_embeddings()).__name__ in ("FactorizedEmbedding", "TiedEmbedding")
    assert_equal_steps(fused, own, batch_of(architecture))


def test_a_head_in_tensor_train_form_serves():
    architecture = ARCHITECTURES["llama-untied"]
    targets = r".*(q_proj|lm_head)"
    fused, own = pair(architecture, target_modules=targets)
    assert type(fused.lm_head).__name__ == "TTLinear"
    assert_equal_steps(fused, own, batch_of(architecture))


OPTIONS = {
    "num_items_in_batch": {"num_items_in_batch": torch.tensor(7)},
    "a number of items": {"num_items_in_batch": 5},
    "ignore_index": {"ignore_index": 3},
    "shift_labels": {"shift_labels": torch.randint(VOCABULARY, (2, 9))},
    "no cache": {"use_cache": False},
    "all hidden states": {"output_hidden_states": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("architecture", [BERT, GPT2, SERVED["modernbert"]], ids=["bert", "gpt2", "modernbert"])
def test_options_of_the_loss_mean_what_they_mean_there(architecture, options):
    if architecture is not GPT2:  # a mask has no next token
        options = {name: value for name, value in options.items() if name not in ("shift_labels", "use_cache")}
    inputs = {**batch_of(architecture), **options}
    if "ignore_index" in options and architecture is not BERT:  # whose labels are then all ids
        inputs["labels"] = inputs["labels"].clamp(min=3)
    assert_equal_steps(*pair(architecture), inputs)


@pytest.mark.parametrize(("auto_class", "config", "reason"), DECLINED.values(), ids=DECLINED)
def test_models_that_do_more_with_their_logits_keep_their_own_forward(auto_class, config, reason):
    model = get_comera_model(auto_class, ComeraConfig(rank=4), config=copy.deepcopy(config))
    assert "head_and_loss" not in vars(model)
    with pytest.raises(ValueError, match=rf"there is no block for {type(model).__name__}: .*{reason}"):
        model.set_head_and_loss()
    model.set_head_and_loss(False)


def test_most_language_models_of_transformers_are_read():
    """Which loss is read for each class, with the name of its head; a release that changes a forward shows here."""
    heads = ("lm_head", "cls", "vocab_projector", "predictions", "generator_lm_head", "decoder", "embed_out")
    found = {}
    for kind in ("MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        for name in set(getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values()):
            model_class = getattr(transformers, name, None)
            if model_class is not None:
                found[name] = {_loss_in_source(model_class, head) for head in heads} & {MEAN, LOSS_FUNCTION}
    assert found["BertForMaskedLM"] == {MEAN}
    assert found["LlamaForCausalLM"] == found["ModernBertForMaskedLM"] == {LOSS_FUNCTION}
    assert found["Gemma2ForCausalLM"] == found["CohereForCausalLM"] == set()
    assert sum(map(bool, found.values())) >= 0.7 * len(found)


def own_loss(logits, labels, vocab_size, **kwargs):
    return logits.float().mean()


def other_loss(model, inputs):
    model.loss_function = own_loss


def hook_on_head(model, inputs):
    model.lm_head.register_forward_hook(lambda *_: None)


def hook_on_embedding(model, inputs):
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: None)


def another_head(model, inputs):
    model.lm_head = nn.Linear(48, VOCABULARY, dtype=torch.float64)
    model.lm_head.forward = lambda x: x @ model.lm_head.weight.T


OWN = {
    "evaluation": lambda model, inputs: model.eval(),
    "no labels": lambda model, inputs: inputs.pop("labels"),
    "tuples": lambda model, inputs: inputs.update(return_dict=False),
    "the last logits": lambda model, inputs: inputs.update(logits_to_keep=2, labels=inputs["labels"][:, -2:]),
    "a loss of the user's": other_loss,
    "a hook on the head": hook_on_head,
    "a hook on the embedding": hook_on_embedding,
    "a head with a forward of its own": another_head,
    "switched off": lambda model, inputs: model.set_head_and_loss(False),
}


@pytest.mark.parametrize("change", OWN.values(), ids=OWN)
def test_the_models_own_forward_runs_where_the_block_does_not_apply(change):
    model, inputs = new_model(GPT2), batch_of(GPT2)
    change(model, inputs)
    outputs = model(**inputs)
    assert not is_fused(outputs)
    if change is other_loss:
        torch.testing.assert_close(outputs.loss, outputs.logits.float().mean())


BAD_LABELS = {
    "too few": (lambda labels: labels[:, :8], ValueError, "labels has shape .* Give an id for each token"),
    "no id": (lambda labels: torch.full_like(labels, 999), IndexError, "labels holds 999"),
    "no integers": (lambda labels: labels.double(), ValueError, "labels has dtype torch.float64"),
}


@pytest.mark.parametrize(("make", "error", "message"), BAD_LABELS.values(), ids=BAD_LABELS)
@pytest.mark.parametrize("architecture", [BERT, GPT2], ids=["bert", "gpt2"])
def test_labels_that_do_not_fit_raise_with_the_remedy(architecture, make, error, message):
    inputs = batch_of(architecture)
    with pytest.raises(error, match=message):
        new_model(architecture)(**{**inputs, "labels": make(inputs["input_ids"])})


def test_without_gradients_the_models_own_forward_runs():
    model = new_model(GPT2)
    with torch.no_grad():
        assert not is_fused(model(**batch_of(GPT2)))


def test_the_loss_of_routers_is_the_models_own():
    architecture = SERVED["mixtral"]
    fused, own = pair(architecture)
    inputs = batch_of(architecture)
    torch.testing.assert_close(
        fused(**inputs, output_router_logits=True).loss, own(**inputs, output_router_logits=True).loss
    )


class Sizes(TorchDispatchMode):
    """The most entries that an operator returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.entries = max(
            self.entries, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), 0
        )
        return result


@pytest.mark.parametrize("compressed", [True, False])
def test_a_step_never_holds_all_logits(compressed, monkeypatch):
    monkeypatch.setattr(fused_loss, "CHUNK_ENTRIES", 20 * VOCABULARY)
    model, entries = new_model(BERT, compressed), []
    ids = torch.randint(VOCABULARY, (4, 60))
    for enabled in (True, False):
        set_head_and_loss(model, enabled)
        with Sizes() as sizes:
            model(input_ids=ids, labels=ids).loss.backward()
        entries.append(sizes.entries)
    assert entries[0] < entries[1] == 240 * VOCABULARY


def test_a_step_with_a_narrow_table_makes_nothing_of_the_size_of_the_dense_one():
    model, ids = new_model(GPT2, embedding_width=11), torch.randint(VOCABULARY, (1, 5))
    with Sizes() as sizes:
        model(input_ids=ids, labels=ids).loss.backward()
    assert sizes.entries < VOCABULARY * 48


READS = {
    "attribute": lambda outputs: outputs.logits,
    "name": lambda outputs: outputs["logits"],
    "number": lambda outputs: outputs[1],
    "number from the end": lambda outputs: outputs[-1],
    "slice": lambda outputs: outputs[:2][1],
    "to_tuple": lambda outputs: outputs.to_tuple()[1],
    "get": lambda outputs: outputs.get("logits"),
    "a copy": lambda outputs: copy.copy(outputs).logits,
    "after Accelerate": lambda outputs: convert_to_fp32(outputs).logits,
}


@pytest.mark.parametrize("read", READS)
def test_logits_are_there_however_they_are_read(read):
    fused, own = pair(BERT)
    inputs = batch_of(BERT)
    outputs, expected = fused(**inputs), own(**inputs)
    assert isinstance(outputs, MaskedLMOutput)
    assert list(outputs.keys()) == list(expected.keys())
    assert "logits" in outputs
    torch.testing.assert_close(READS[read](outputs), expected.logits)
    assert outputs.logits is outputs.logits


def test_neither_the_loss_nor_a_look_over_the_fields_computes_logits():
    model, calls = new_model(BERT), []
    outputs = model(**batch_of(BERT))
    model.cls.register_forward_hook(lambda *_: calls.append(1))
    assert outputs.loss is outputs["loss"] is outputs[0]
    assert [name for name, _ in outputs.items()] == ["loss", "logits"]
    tree_leaves(outputs)
    assert not calls
    outputs.to_tuple()
    assert calls


@served
@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "dense"])
def test_a_head_that_is_left_out_makes_the_logits_of_what_the_model_gives(architecture, compressed):
    model, inputs = new_model(architecture, compressed), architecture.inputs()
    block = HeadAndLoss.of(model)
    head = model.get_submodule(block.head)
    for train in (False, True):
        model.train(train)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with head_left_out(model, block) as left_out:
            hidden = model(**inputs).logits
        assert left_out is head is model.get_submodule(block.head)
        torch.testing.assert_close(left_out(hidden[:, :3]), model(**inputs).logits[:, :3])
    with pytest.raises(ValueError, match="specify"), head_left_out(model, block):
        model()
    assert model.get_submodule(block.head) is head
    with head_left_out(model, None) as nothing:
        assert nothing(model(**inputs).logits).shape[-1] == VOCABULARY


def test_gradients_flow_through_logits_that_are_read_with_gradients():
    fused, own = pair(BERT)
    inputs = batch_of(BERT)
    for model in (fused, own):
        with torch.no_grad():
            model(**inputs).logits.argmax(-1)
        outputs = model(**inputs)
        (outputs.loss + outputs.logits.square().mean()).backward()
    for mine, theirs in zip(fused.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_reading_without_gradients_first_does_not_lose_them():
    outputs = new_model(BERT)(**batch_of(BERT))
    with torch.no_grad():
        assert not outputs.logits.requires_grad
    assert outputs.logits.requires_grad


CHANGES = {
    "a step": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "another table": lambda model: model.cls.predictions.decoder.source.reset_parameters(),
    "other data": lambda model: setattr(model.cls.predictions.bias, "data", model.cls.predictions.bias + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_logits_of_a_head_that_has_changed_raise(change):
    model = new_model(BERT)
    outputs = model(**batch_of(BERT))
    outputs.loss.backward()
    change(model)
    with pytest.raises(RuntimeError, match=r"head has changed since.*set_head_and_loss\(False\)"):
        _ = outputs.logits


def test_under_autocast_logits_are_those_of_autocast():
    fused, own = (model.float() for model in pair(BERT))
    inputs = batch_of(BERT)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, expected = fused(**inputs), own(**inputs)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-2, atol=1e-3)
    assert outputs.logits.dtype == expected.logits.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.logits, expected.logits)
    with torch.autocast("cpu", torch.bfloat16):
        converted = convert_to_fp32(fused(**inputs))
    assert converted.logits.dtype == converted.loss.dtype == torch.float32


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_have_the_block_of_their_own(make):
    model = new_model(GPT2)
    other = make(model)
    inputs = batch_of(GPT2)
    outputs = other(**inputs)
    assert is_fused(outputs)
    outputs.loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(parameter.grad is not None for parameter in other.parameters())


def test_a_merged_model_has_the_forward_of_its_class():
    model = new_model(GPT2).merge_and_unload()
    assert "head_and_loss" not in vars(model)
    assert not is_fused(model(**batch_of(GPT2)))


def test_a_dense_model_is_as_before_where_it_is_switched_off():
    model = new_model(GPT2, compressed=False)
    before = dict(vars(model))
    set_head_and_loss(model)
    assert is_fused(model(**batch_of(GPT2)))
    set_head_and_loss(model, False)
    assert vars(model).keys() == before.keys()
    assert not is_fused(model(**batch_of(GPT2)))


@pytest.mark.parametrize("architecture", [BERT, GPT2, ARCHITECTURES["t5"]], ids=["bert", "gpt2", "t5"])
def test_shapes_are_there_on_the_meta_device(architecture):
    model = new_model(architecture).to("meta")
    inputs = {name: tensor.to("meta") for name, tensor in batch_of(architecture).items()}
    outputs = model(**inputs)
    outputs.loss.backward()
    assert outputs.loss.shape == ()
    assert outputs.logits.shape[-1] == VOCABULARY


@pytest.mark.parametrize("policy", ["rank", "rank+fp8"])
def test_under_an_activation_policy_gradients_of_the_head_stay_exact(policy):
    fused, own = pair(BERT)
    inputs = batch_of(BERT)
    gradients = []
    for model, chosen in ((fused, policy), (own, None)):
        model.set_activation_policy(chosen)
        model(**inputs).loss.backward()
        gradients.append(model.cls.predictions.bias.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("architecture", [BERT, ARCHITECTURES["llama-tied"]], ids=["bert", "llama"])
def test_compiled_models_have_the_block_in_one_graph(architecture):
    model = new_model(architecture)
    inputs = batch_of(architecture)
    expected = model(**inputs)
    gradients = torch.autograd.grad(expected.loss, list(model.parameters()), allow_unused=True)
    torch._dynamo.reset()
    outputs = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)
    assert isinstance(outputs.__dict__["logits"], DeferredLogits)
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.logits, expected.logits)
    torch.testing.assert_close(outputs.to_tuple()[1], expected.logits)
    found = torch.autograd.grad(outputs.loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(found, gradients)


def test_compiled_models_have_their_own_forward_where_children_were_exchanged():
    model = new_model(BERT)
    model.bert = copy.deepcopy(model.bert)  # what compiled code was to call is of before
    inputs = batch_of(BERT)
    torch._dynamo.reset()
    outputs = torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    assert isinstance(outputs.__dict__["logits"], Tensor)
    torch.testing.assert_close(outputs.loss, model(**inputs).loss)


def test_where_shapes_are_fixed_all_tokens_are_computed():
    fused, own = pair(BERT)
    with fixed_shapes():
        assert_equal_steps(fused, own, batch_of(BERT))


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "bf16": {"bf16": True},
}


@pytest.fixture
def _own_accelerate():
    """Accelerate keeps its precision for a whole process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_own_accelerate")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("architecture", [BERT, GPT2], ids=["bert", "gpt2"])
def test_trainer_learns_the_same(architecture, settings, tmp_path):
    rows = [{name: tensor[0] for name, tensor in batch_of(architecture).items()} for _ in range(8)]
    losses = []
    for model in pair(architecture):
        args = TrainingArguments(
            **{"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "max_steps": 3, "logging_steps": 1},
            **{"per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True, **settings},
        )
        trainer = Trainer(model=model.float(), args=args, train_dataset=rows, eval_dataset=rows[:2])
        trainer.train()
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        losses.append([float(loss) for loss in logged] + [trainer.evaluate()["eval_loss"]])
    tolerance = 2e-2 if settings.get("bf16") else 1e-4
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def test_a_block_says_what_it_read():
    assert HeadAndLoss.of(new_model(BERT)) == HeadAndLoss("cls", "predictions.decoder", MEAN, decodes=False)
    assert HeadAndLoss.of(new_model(GPT2)) == HeadAndLoss("lm_head", "", LOSS_FUNCTION, decodes=False)
