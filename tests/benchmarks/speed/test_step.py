"""benchmarks/speed/step.py: the step that is timed, plain and as a graph, and what is refused."""

import copy
import re
import sys

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.speed import step as speed_step
from benchmarks.speed.step import (
    HIDDEN_SHARE,
    IGNORED,
    LARGE,
    MODELS,
    NARROW_DENSE,
    TINY_CAUSAL,
    TINY_CLASSIFIER,
    TINY_DECODER,
    TINY_MASKED,
    Step,
    build_models,
    make_optimizer,
    prepare_step,
    random_ids,
)
from hf_comera import ComeraConfig, get_comera_model
from hf_comera.ops.cuda import switch
from loop import memory
from loop.measure import DENSE, TENSOR_TRAIN
from tests.training.tape_capture import use_tape

CONFIG = BertConfig(
    vocab_size=30522, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=3
)


def tiny_model():
    torch.manual_seed(0)
    return get_comera_model(BertForSequenceClassification, ComeraConfig(rank=4), config=CONFIG)


def parse(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["step.py", *words])
    return speed_step.parse_arguments()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", ["4x8", "1x5", "3x1"])
def test_padded_rows_are_from_half_to_full_length_and_have_a_mask(size, model):
    rows, length = map(int, size.split("x"))
    batch = speed_step.random_batch(size, torch.device("cpu"), model, padded=True)
    mask, lengths = batch["attention_mask"], batch["attention_mask"].sum(1).tolist()
    assert mask.shape == batch["input_ids"].shape == (rows, length)
    assert lengths == sorted(lengths)
    assert min(lengths) >= length / 2
    assert lengths[-1] == length or rows == 1
    assert not batch["input_ids"][mask == 0].any()
    assert batch["labels"].ndim == 1 or (batch["labels"][mask == 0] == -100).all()
    assert torch.equal(mask, (torch.arange(length) < torch.tensor(lengths).unsqueeze(1)).long())


@pytest.mark.parametrize("padded", [False, True])
def test_only_padded_rows_have_a_mask_where_none_is_the_fastest(padded):
    assert ("attention_mask" in speed_step.random_batch("2x8", torch.device("meta"), padded=padded)) == padded


@pytest.mark.parametrize("optimizer", ["tt_muon", "adamw"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plain_step_trains(optimizer, dtype):
    batch = speed_step.random_batch("2x8", torch.device("cpu"))
    ready = prepare_step(tiny_model(), optimizer, batch, dtype=dtype, graphs=False)
    before = [parameter.clone() for parameter in ready.plain.model.parameters()]
    ready.run()
    after = list(ready.plain.model.parameters())
    assert not all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in after)
    assert ready.saved_bytes > 0
    assert ready.optimizer_s > 0
    assert ready.peak_bytes is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks where a graph breaks
@pytest.mark.parametrize("model", [TINY_MASKED, TINY_CAUSAL])
def test_language_models_take_a_compiled_step(model, monkeypatch):
    monkeypatch.setattr(speed_step, "COMPILER", "eager")  # all but the slow part of compiling
    torch._dynamo.reset()
    batch = speed_step.random_batch("2x8", torch.device("cpu"), model)
    for form, built in build_models(model, dropout=0.0).items():
        plain, compiled = (copy.deepcopy(built) for _ in range(2))
        steps = [
            prepare_step(each, "adamw", batch, dtype="fp32", graphs=False, compiled=each is compiled)
            for each in (plain, compiled)
        ]
        steps[0].run()  # compiling takes a step
        assert steps[0].saved_bytes == steps[1].saved_bytes, form
        losses = [step.plain.loss().detach() for step in steps]
        torch.testing.assert_close(*losses)


@pytest.mark.parametrize("model", [TINY_CLASSIFIER, TINY_DECODER])
def test_other_models_take_a_step(model):
    batch = speed_step.random_batch("2x8", torch.device("cpu"), model)
    for built in build_models(model, dropout=0.1).values():
        prepare_step(built, "adamw", batch, dtype="fp32", graphs=False).run()


@pytest.mark.parametrize("model", [TINY_MASKED, TINY_CAUSAL])
def test_a_narrow_table_is_timed_beside_a_dense_model_with_one(model, monkeypatch):
    args = parse(monkeypatch, "--batch", "2x8", "--rounds", "1", "--threads", "1", "--dropout", "0")
    args.model, args.embedding_width = model, 8
    monkeypatch.setattr(speed_step, "in_own_process", lambda *_: None)
    models = build_models(model, 0.0, embedding_width=8)
    kinds = {layer.kind for layer in models[NARROW_DENSE].comera_plan()}
    assert kinds == {"factorized_embedding"}
    row = speed_step.compare(models, args).row()
    assert row["embedding_width"] == 8
    assert row["narrow_dense_step_s"] > 0
    assert row["tensor_train_parameters"] < row["narrow_dense_parameters"] < row["dense_parameters"]


def test_labels_are_those_of_the_task():
    ids, labels = random_ids(TINY_CAUSAL, 3, 9)
    assert torch.equal(ids, labels)
    ids, labels = random_ids(TINY_MASKED, 20, 50)
    asked = labels != IGNORED
    assert torch.equal(ids[asked], labels[asked])
    assert asked.float().mean().item() == pytest.approx(HIDDEN_SHARE, abs=0.05)
    ids, labels = random_ids(TINY_CLASSIFIER, 3, 9)
    assert labels.shape == (3,)


def test_a_graph_trains_as_plain_steps_do(monkeypatch):
    use_tape(monkeypatch)
    monkeypatch.setattr("hf_comera.training.cuda_graphs.step.why_not_captured", lambda optimizer: None)
    batch = speed_step.random_batch("2x8", torch.device("cpu"))
    models = [tiny_model().eval() for _ in range(2)]
    plain, graphed = (Step(model, make_optimizer(model, "tt_muon"), batch, "fp32") for model in models)
    replay = graphed.as_graph()  # with steps that warm up, and a first replay
    replay()
    for _ in range(5):
        plain()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_that_cannot_be_recorded_says_why():
    batch = speed_step.random_batch("2x8", torch.device("cpu"))
    model = tiny_model()
    with pytest.raises(RuntimeError, match=r"no CUDA graph: .* Leave --graphs out"):
        Step(model, make_optimizer(model, "tt_muon"), batch, "fp32").as_graph()


@pytest.mark.slow
def test_large_models_agree_with_each_other():
    models = build_models(LARGE, dropout=0.0)
    dense, small = (sum(p.numel() for p in models[form].parameters()) for form in (DENSE, TENSOR_TRAIN))
    assert dense > 10 * small


def test_the_whole_script_with_kernels(monkeypatch, capsys):
    monkeypatch.setattr(speed_step, "build_models", lambda *_: {DENSE: tiny_model(), TENSOR_TRAIN: tiny_model()})
    monkeypatch.setattr(switch, "_wanted", False)
    words = ["--batch", "2x8", "--padded", "--rounds", "1", "--no-save", "--threads", "1"]
    args = parse(monkeypatch, *words)
    args.kernels = True
    monkeypatch.setattr(speed_step, "parse_arguments", lambda: args)
    monkeypatch.setattr(speed_step, "in_own_process", lambda threads, measure, *values: measure(*values))
    speed_step.main()
    printed = capsys.readouterr().out
    assert "ratio" in printed
    if memory.CLEAR_REFS.exists():
        assert len(re.findall(r"peak bytes +│ +[\d,]+ │", printed)) == 2
    assert switch.kernels_are_wanted()


def test_defaults_are_those_of_the_rows(monkeypatch):
    case = speed_step.case_of(parse(monkeypatch))
    assert case == {
        "model": "bert-6x768", "optimizer": "tt_muon", "dtype": "fp32", "dropout": 0.1, "tokens": "32x128",
        "gpu": "", "graphs": "", "kernels": "", "compiled": "", "padded": "", "dense_block": "",
        "embedding_width": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "ratio"),
    [
        ([], 3.8),
        (["--dropout", "0"], 5.2),
        (["--dtype", "bf16"], 2.7),
        (["--batch", "8x128"], None),
        (["--padded"], None),
        (["--model", "bert-24x1024"], None),
        (["--compile"], None),
        (["--model", "roberta-12x768", "--embedding_width", "128"], None),
    ],
)
def test_promises(monkeypatch, words, ratio):
    assert speed_step.promised(parse(monkeypatch, *words)) == ratio


@pytest.mark.parametrize(
    ("graphs", "batch", "ratio"), [(True, "32x128", 3.0), (True, "128x128", 2.7), (False, "32x128", None)]
)
def test_promises_on_a_gpu_are_of_graphs(monkeypatch, graphs, batch, ratio):
    args = parse(monkeypatch, "--dtype", "bf16", "--batch", batch)
    args.device, args.graphs = "cuda", graphs
    assert speed_step.promised(args) == ratio


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--graphs"], "need --device cuda"),
        (["--kernels"], "need --device cuda"),
        (["--dtype", "tf32"], "need --device cuda"),
        (["--batch", "32"], "--batch 32 is not ROWSxTOKENS, such as 32x128"),
        (["--batch", "0x4"], "--batch 0x4 is not ROWSxTOKENS"),
        (["--model", "bert"], "invalid choice: 'bert'"),
        (["--embedding_width", "64"], "--embedding_width is for language models, and bert-6x768 is a classifier"),
        (["--embedding_width", "0"], "--embedding_width: "),
        pytest.param(
            ["--device", "cuda"],
            "torch finds no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, capsys, words, message):
    with pytest.raises(SystemExit):
        parse(monkeypatch, *words)
    assert message in capsys.readouterr().err
