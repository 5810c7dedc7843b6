"""hf_comera/training/heal.py: models of each kind come nearer to their teachers, resume exactly, or are refused."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    BertConfig,
    CohereConfig,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    TrainingArguments,
)

from hf_comera import ComeraConfig, HealingArguments, HealingTrainer, RankAdaptation, get_comera_model, size_report
from hf_comera.training import distillation
from hf_comera.training.heal import chosen_tokens, falling, no_dropout
from tests.architectures import ARCHITECTURES, SIZES, VOCABULARY, WORDS, Architecture
from tests.training.trainer_runs import same

BERT = BertConfig(**SIZES, **WORDS)
KINDS = {
    "encoder": Architecture(AutoModel, BERT, 13),
    "encoder of T5": Architecture(T5EncoderModel, ARCHITECTURES["t5"].config, 0),
    "tokens to classes": Architecture(AutoModelForTokenClassification, BERT, 13),
    "no block": Architecture(AutoModelForCausalLM, CohereConfig(**SIZES, **WORDS), 15),
    **{name: ARCHITECTURES[name] for name in ("bert-mlm", "gpt2", "llama-untied", "t5", "bert-classifier", "vit")},
}
OBJECTIVES = {
    "embedding": ("encoder", "encoder of T5"),
    "tokens": ("bert-mlm", "gpt2", "llama-untied", "t5", "no block"),
    "classes": ("tokens to classes", "bert-classifier", "vit"),
}
KIND_OBJECTIVES = [(kind, objective) for objective, kinds in OBJECTIVES.items() for kind in kinds]
LOSSES = {"embedding": {"embedding_loss", "similarity_loss"}, "tokens": {"token_loss"}, "classes": {"class_loss"}}
TEXTS = [" ".join(f"w{(7 * i + j * j) % 200 + 5}" for j in range(1 + i % 9)) for i in range(37)]


def tokenizer(**special):
    names = ["<pad>", "<unk>", "<eos>", *(f"w{i}" for i in range(3, VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **(special or {"pad_token": "<pad>"}))


def teacher_of(kind):
    torch.manual_seed(0)
    architecture = KINDS[kind]
    if architecture.auto_class is T5EncoderModel:
        model = T5EncoderModel(architecture.new_config())
    else:
        model = architecture.auto_class.from_config(architecture.new_config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # so that it has opinions
    return model.eval()


def student_of(teacher, **settings):
    return get_comera_model(copy.deepcopy(teacher), ComeraConfig(**{"rank": 8, "num_factors": 1, **settings}))


def examples(kind, count=12):
    torch.manual_seed(1)
    if kind == "vit":
        return [{"pixel_values": torch.randn(3, 32, 32)} for _ in range(count)]
    rows = [torch.randint(2, VOCABULARY, (9,)) for _ in range(count)]
    return [{"input_ids": row, **({"labels": row[:5]} if kind == "t5" else {})} for row in rows]


def arguments(folder, **settings):
    fixed = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    defaults = {"max_steps": 6, "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 4}
    return HealingArguments(str(folder), **fixed, **{**defaults, **settings})


def healing(folder, kind="encoder", data=None, student=None, trainer=None, **settings):
    teacher = teacher_of(kind)
    return HealingTrainer(
        model=student or student_of(teacher), teacher=teacher, args=arguments(folder, **settings),
        train_dataset=examples(kind) if data is None else data,
        **{"processing_class": tokenizer() if data is TEXTS else None, **(trainer or {})},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Nothing here is worth a warning."""
    yield
    assert not [warning for warning in recwarn if "decomposition" not in str(warning.message)]


@pytest.mark.parametrize(("kind", "objective"), KIND_OBJECTIVES)
def test_the_objective_is_found_and_the_student_comes_nearer(kind, objective, tmp_path):
    trainer = healing(tmp_path, kind, learning_rate=3e-3, max_steps=12)
    assert trainer.objective == objective
    before = trainer.evaluate(examples(kind))
    assert {name.removeprefix("eval_") for name in before} >= LOSSES[objective] | {"hidden_loss", "loss"}
    trainer.train()
    after = trainer.evaluate(examples(kind))
    for name in LOSSES[objective]:
        assert after[f"eval_{name}"] < before[f"eval_{name}"], name
    logged = trainer.state.log_history[0]
    assert logged.keys() >= LOSSES[objective] | {"hidden_loss"}
    assert logged["loss"] == pytest.approx(sum(logged[name] for name in LOSSES[objective]) + logged["hidden_loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_like_its_teacher_has_nothing_to_learn(kind, tmp_path):
    trainer = healing(tmp_path, kind, student=copy.deepcopy(teacher_of(kind)))
    metrics = trainer.evaluate(examples(kind))
    losses = {name: value for name, value in metrics.items() if name.endswith("_loss")}
    assert losses == pytest.approx(dict.fromkeys(losses, 0.0), abs=1e-5)


def test_texts_become_sentences_of_batches_of_similar_lengths(tmp_path):
    trainer = healing(tmp_path, data=TEXTS, max_length=7)
    for epoch in (0, 1):
        loader = trainer.get_train_dataloader()
        loader.set_epoch(epoch)
        batches = [batch["attention_mask"].sum(1) for batch in loader]
        assert sorted(torch.cat(batches).tolist()) == sorted(min(len(text.split()), 7) for text in TEXTS)
        assert sum(int(lengths.max() - lengths.min()) for lengths in batches[:-1]) <= 7
    assert trainer.evaluate(TEXTS[:5]).keys() >= {"eval_embedding_loss"}
    trainer = healing(tmp_path, data=TEXTS, trainer={"eval_dataset": {"short": TEXTS[:5], "all": TEXTS}})
    assert trainer.evaluate().keys() >= {"eval_short_embedding_loss", "eval_all_similarity_loss"}


@pytest.mark.parametrize("kind", ["encoder", "bert-mlm", "gpt2", "bert-classifier", "tokens to classes"])
def test_padding_does_not_change_the_loss(kind, tmp_path):
    rows = [row["input_ids"] for row in examples(kind, 2)]
    trainer = healing(tmp_path, kind)
    short = {"input_ids": torch.stack([rows[0], torch.cat([rows[1][:6], torch.zeros(3, dtype=torch.long)])])}
    short["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    long = {name: nn.functional.pad(value, (0, 5)) for name, value in short.items()}
    losses = [trainer.compute_loss(trainer.model.eval(), batch) for batch in (short, long)]
    torch.testing.assert_close(*losses)


def test_the_weight_of_hidden_states_falls_to_nothing(tmp_path):
    assert [falling(share, "linear") for share in (0, 0.25, 1, 2)] == [1, 0.75, 0, 0]
    assert [falling(share, "cosine") for share in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])
    trainer = healing(tmp_path, hidden_schedule="linear", hidden_weight=3.0, similarity_weight=0.0, max_steps=4)
    trainer.train()
    for step, entry in enumerate(trainer.state.log_history[:4]):
        assert "similarity_loss" not in entry
        expected = entry["embedding_loss"] + 3 * (1 - step / 4) * entry["hidden_loss"]
        assert entry["loss"] == pytest.approx(expected, rel=1e-5)


def test_without_hidden_states_none_are_computed(tmp_path):
    trainer = healing(tmp_path, hidden_weight=0.0, max_steps=2)
    trainer.train()
    assert not any("hidden_loss" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("step", [2, 10, 12])
@pytest.mark.parametrize("kind", ["encoder", "gpt2"])
def test_resuming_is_exact_also_in_the_second_epoch(kind, step, tmp_path):
    def run(folder, resume=None):
        settings = {"max_steps": 14, "save_strategy": "steps", "save_steps": 1}  # of 9.25 batches an epoch
        trainer = healing(folder, kind, data=TEXTS, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert same(whole.model, resumed.model)


@pytest.mark.parametrize("kind", ["gpt2", "bert-mlm", "t5", "encoder", "bert-classifier"])
def test_accumulated_batches_of_unequal_lengths_are_one_large_batch(kind, tmp_path):
    lengths = [9, 2, 5, 7]
    rows = [row["input_ids"][:length] for row, length in zip(examples(kind, 4), lengths, strict=True)]
    labels = [torch.where(torch.arange(len(row)) % 3 == 0, row, -100) for row in rows]
    data = [
        {"input_ids": row, **({"labels": label} if kind in ("bert-mlm", "t5") else {})}
        for row, label in zip(rows, labels, strict=True)
    ]

    def collate(features):
        sequences = {name: [feature[name] for feature in features] for name in features[0]}
        padded = {
            name: nn.utils.rnn.pad_sequence(values, True, -100 if name == "labels" else 0)
            for name, values in sequences.items()
        }
        mask = [torch.ones_like(row) for row in sequences["input_ids"]]
        return {**padded, "attention_mask": nn.utils.rnn.pad_sequence(mask, True, 0)}

    def gradients(batch, accumulated):
        settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_steps": 1}
        settings |= {"max_grad_norm": 0.0, "similarity_weight": 0.0, "train_sampling_strategy": "sequential"}
        model = student_of(teacher_of(kind))
        optimizers = {"optimizers": (torch.optim.SGD(model.parameters(), lr=1.0), None)}
        trainer = healing(
            tmp_path, kind, data, model, {"data_collator": collate, **optimizers}, warmup_steps=0.0, **settings
        )
        before = copy.deepcopy(model.state_dict())
        trainer.train()
        changes = {
            name: value - before[name] for name, value in model.state_dict().items() if value.is_floating_point()
        }
        return changes, trainer.state.log_history[0]["loss"]

    (whole, loss), (parts, loss_of_parts) = gradients(4, 1), gradients(1, 4)
    assert loss_of_parts == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4)
    assert max(change.abs().max() for change in whole.values()) > 1e-2


CHOSEN = [
    ("gpt2", {"input_ids": [[5, 6, 7]], "labels": [[-100, 6, 7]]}, [[1, 1, 1]]),
    ("gpt2", {"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]]}, [[1, 1, 0]]),
    ("bert-mlm", {"input_ids": [[5, 6, 7]], "labels": [[-100, 6, -100]]}, [[0, 1, 0]]),
    ("bert-mlm", {"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]]}, [[1, 1, 0]]),
    ("t5", {"input_ids": [[5, 6, 7]], "labels": [[8, -100]]}, [[1, 0]]),
    ("t5", {"input_ids": [[5]], "decoder_input_ids": [[8, 1]], "decoder_attention_mask": [[1, 0]]}, [[1, 0]]),
]


@pytest.mark.parametrize(("kind", "batch", "chosen"), CHOSEN)
def test_tokens_are_chosen_by_labels_where_these_say_what_is_asked(kind, batch, chosen):
    batch = {name: torch.tensor(value) for name, value in batch.items()}
    assert torch.equal(chosen_tokens(batch, KINDS[kind].new_model()), torch.tensor(chosen) == 1)


def test_losses_of_tokens_equal_those_of_whole_logits(tmp_path):
    for kind in ("bert-mlm", "gpt2", "llama-untied", "no block"):
        trainer = healing(tmp_path, kind, hidden_weight=0.0, top_k=5, temperature=1.5)
        batch = {"input_ids": torch.stack([row["input_ids"] for row in examples(kind, 3)])}
        model, teacher = trainer.model.double().eval(), trainer.teacher.double()
        with torch.no_grad():
            top = distillation.top_logits(teacher(**batch).logits.flatten(0, 1), 5, 1.5)
            expected = distillation.token_divergence(model(**batch).logits.flatten(0, 1), top, 1.5).mean()
        with no_dropout(model):
            loss = trainer.compute_loss(model.train(), batch)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["bert-mlm", "gpt2", "t5"])
def test_all_parameters_but_unused_ones_learn_through_the_head(kind, tmp_path):
    trainer = healing(tmp_path, kind, hidden_weight=0.0)
    batch = {name: value[None] for name, value in examples(kind, 1)[0].items()}
    trainer.compute_loss(trainer.model.train(), batch).backward()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())
    assert all(parameter.grad is None for parameter in trainer.teacher.parameters())
    assert not trainer.teacher.training


@pytest.mark.parametrize("kind", ["encoder", "gpt2", "t5", "vit"])
def test_dropout_is_off_for_the_run_and_back_after_it(kind, tmp_path):
    model = student_of(teacher_of(kind)).train()
    inputs = KINDS[kind].inputs()

    def outputs():
        return model(**inputs, output_hidden_states=True)[-1]

    def is_random():
        first, second = (outputs() for _ in range(2))
        return not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    random_before = kind in ("encoder", "gpt2", "t5")
    assert is_random() == random_before
    with no_dropout(model):
        assert not is_random()
    assert is_random() == random_before


@pytest.mark.parametrize("keep", [True, False])
def test_students_dropout_follows_the_arguments(keep, tmp_path):
    trainer = healing(tmp_path, student_dropout=keep, max_steps=1)
    seen = []
    trainer.model.register_forward_hook(lambda model, *_: seen.append(model.embeddings.dropout.p))
    trainer.train()
    assert seen == [0.1 if keep else 0.0]
    assert trainer.model.embeddings.dropout.p == 0.1


def test_ranks_are_cut_on_the_way(tmp_path):
    student = student_of(teacher_of("encoder"))
    report = size_report(student)
    wanted = int(report.parameters - 0.5 * report.compressed_parameters)
    adaptation = RankAdaptation(target_parameters=wanted, early=1, late=4, cut_every=1)
    trainer = healing(tmp_path, student=student, trainer={"rank_adaptation": adaptation})
    trainer.train()
    assert size_report(student).parameters <= wanted


def test_predictions_are_embeddings_or_classes(tmp_path):
    shapes = []
    trainer = {"compute_metrics": lambda prediction: shapes.append(prediction.predictions.shape) or {"seen": 1}}
    for kind, width in (("encoder", 48), ("bert-classifier", 2)):
        labelled = [{**row, "label": i % 2} for i, row in enumerate(examples(kind))]
        metrics = healing(tmp_path, kind, trainer=trainer).evaluate(labelled)
        assert metrics["eval_seen"] == 1
        assert shapes.pop() == (12, width)


def test_an_evaluation_is_the_mean_of_its_sentences(tmp_path):
    sizes = ({"per_device_eval_batch_size": size, "similarity_weight": 0.0} for size in (7, 3))
    losses = [healing(tmp_path, **size).evaluate(examples("encoder", 7)) for size in sizes]
    for name in ("eval_loss", "eval_embedding_loss", "eval_hidden_loss"):
        assert losses[0][name] == pytest.approx(losses[1][name], rel=1e-5)
    assert losses[0]["eval_loss"] == losses[0]["eval_embedding_loss"]


def test_a_teacher_keeps_its_dtype_and_heals_in_bf16(tmp_path):
    teacher = teacher_of("gpt2").bfloat16()
    student = student_of(teacher_of("gpt2"))
    args = arguments(tmp_path, bf16=True, max_steps=2)
    trainer = HealingTrainer(model=student, teacher=teacher, args=args, train_dataset=examples("gpt2"))
    trainer.train()
    assert trainer.teacher.dtype == torch.bfloat16
    assert student.dtype == torch.float32
    assert all(parameter.isfinite().all() for parameter in student.parameters())


def test_arguments_come_from_the_command_line():
    parser = HfArgumentParser(HealingArguments)
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", "out", "--pooling", "cls", "--hidden_weight", "0.5", "--student_dropout", "--use_cpu"]
    )
    assert (args.pooling, args.hidden_weight, args.student_dropout, args.top_k) == ("cls", 0.5, True, 64)
    assert args.lr_scheduler_type == "cosine"
    assert args.get_warmup_steps(100) == 5


def other(**changes):
    return Architecture(AutoModel, BertConfig(**{**SIZES, **WORDS, **changes}), 0).new_model()


def asked(name):
    return Architecture(AutoModelForQuestionAnswering, BERT, 0).new_model() if name == "qa" else None


STUDENT = {"encoder": lambda: teacher_of("encoder"), "mlm": lambda: teacher_of("bert-mlm")}
REFUSED = [
    ("encoder", {"teacher": lambda: other(vocab_size=99)}, "vocab_size is 241 in the student and 99 in the teacher"),
    ("encoder", {"teacher": lambda: other(hidden_size=96)}, "hidden_size is 48 .* 96 .* Use the dense model"),
    ("mlm", {"teacher": lambda: AutoModelForMaskedLM.from_config(BertConfig(**{**SIZES, **WORDS, "hidden_size": 96}))},
     "hidden_size is 48 in the student and 96 .* Use hidden_weight=0"),
    ("encoder", {"teacher": lambda: other(num_hidden_layers=3)}, "num_hidden_layers is 2 .* Use hidden_weight=0"),
    ("encoder", {"teacher": lambda: student_of(teacher_of("encoder"))}, "teacher is compressed"),
    ("encoder", {"teacher": lambda: "bert"}, "teacher is a str"),
    ("encoder", {"train_dataset": []}, "train_dataset is empty"),
    ("encoder", {"train_dataset": ["w5", " "]}, r"train_dataset\[1\]=' ' is no text"),
    ("encoder", {"train_dataset": ["w5", 3]}, r"train_dataset\[1\]=3 is no text"),
    ("encoder", {"eval_dataset": {"a": [""]}}, r"eval_dataset\['a'\]\[0\]='' is no text"),
    ("encoder", {"processing_class": None}, "processing_class=None, but texts need a tokenizer"),
    ("encoder", {"processing_class": tokenizer(eos_token="<eos>")}, "no token for padding"),
    ("encoder", {"cuda_graphs": True}, "cuda_graphs=True"),
    ("mlm", {"compute_metrics": len}, "compute_metrics needs predictions"),
    ("encoder", {"args": TrainingArguments("out", use_cpu=True)}, "args is a TrainingArguments"),
]  # fmt: skip


@pytest.mark.parametrize(("student", "change", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_does_not_go_together_is_refused_by_name(student, change, message, tmp_path):
    made = {name: value() if name == "teacher" else value for name, value in change.items()}
    model = student_of(STUDENT[student]())
    settings = {"args": arguments(tmp_path), "train_dataset": TEXTS, "processing_class": tokenizer()}
    with pytest.raises(ValueError, match=message):
        HealingTrainer(model=model, **{"teacher": STUDENT[student](), **settings, **made})


def test_a_teacher_that_is_the_student_is_refused(tmp_path):
    dense = teacher_of("encoder")
    with pytest.raises(ValueError, match="model and teacher share parameters"):
        HealingTrainer(model=dense, teacher=dense, args=arguments(tmp_path), train_dataset=examples("encoder"))
    student = student_of(dense)
    student.embeddings.LayerNorm = dense.embeddings.LayerNorm
    with pytest.raises(ValueError, match=r"share parameters, such as 'embeddings\.LayerNorm\.weight'"):
        HealingTrainer(model=student, teacher=dense, args=arguments(tmp_path), train_dataset=examples("encoder"))


@pytest.mark.parametrize(
    "config",
    [BertConfig(**SIZES, **WORDS), T5Config(d_model=48, d_ff=96, d_kv=12, num_heads=4, num_layers=2, **WORDS)],
)
def test_models_for_something_else_are_refused_with_those_that_work(config, tmp_path):
    auto_class = AutoModelForQuestionAnswering if config.model_type == "bert" else AutoModel
    dense = auto_class.from_config(config)
    with pytest.raises(ValueError, match=r"not known what \w+ is for.*AutoModelForMaskedLM"):
        HealingTrainer(model=copy.deepcopy(dense), teacher=dense, args=arguments(tmp_path))


def test_an_objective_that_the_outputs_do_not_serve_is_refused(tmp_path):
    trainer = healing(tmp_path, objective="classes")
    with pytest.raises(ValueError, match=r"objective='classes' needs logits .* they have last_hidden_state"):
        trainer.train()


def test_a_decoder_without_a_target_is_refused(tmp_path):
    trainer = healing(tmp_path, "t5", data=TEXTS)
    with pytest.raises(ValueError, match="but decoder_input_ids or labels are needed"):
        trainer.train()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("objective", "regression"), ("pooling", "max"), ("hidden_schedule", "step"), ("similarity_weight", -1.0),
        ("hidden_weight", float("nan")), ("temperature", 0.0), ("top_k", 0), ("max_length", 1.5),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(setting, value, tmp_path):
    with pytest.raises(ValueError, match=f"^{setting}="):
        arguments(tmp_path, **{setting: value})
